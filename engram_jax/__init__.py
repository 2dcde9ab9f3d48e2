"""DeepSeek's Engram, conditional memory by n-gram lookup, in JAX."""

from . import kernels as kernels
from . import mxfp8 as mxfp8
from .config import EngramConfig as EngramConfig
from .layout import EngramLayout as EngramLayout
from .layout import compute_hash_multipliers as compute_hash_multipliers
from .layout import find_next_prime as find_next_prime
from .vocabulary import build_compressed_token_map as build_compressed_token_map
from .vocabulary import fingerprint as fingerprint
