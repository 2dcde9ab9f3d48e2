"""DeepSeek's Engram, conditional memory by n-gram lookup, in JAX."""

from . import kernels as kernels
from . import mxfp8 as mxfp8
from .batching import bucket_size as bucket_size
from .batching import pad_batch as pad_batch
from .checkpoint import load_engram as load_engram
from .checkpoint_writer import save_engram as save_engram
from .config import EngramConfig as EngramConfig
from .constant import Constant as Constant
from .embedding import ParallelEngramEmbedding as ParallelEngramEmbedding
from .hash_state import NgramHashState as NgramHashState
from .host_memory import HostMemoryOptions as HostMemoryOptions
from .hot_rows import HotRowCache as HotRowCache
from .layer import Engram as Engram
from .layout import EngramLayout as EngramLayout
from .layout import compute_hash_multipliers as compute_hash_multipliers
from .layout import find_next_prime as find_next_prime
from .mesh_stack import pad_replicas as pad_replicas
from .prefetch import EngramPrefetch as EngramPrefetch
from .sharding import EngramSharding as EngramSharding
from .stack import EngramBatch as EngramBatch
from .stack import EngramStack as EngramStack
from .vocabulary import build_compressed_token_map as build_compressed_token_map
from .vocabulary import fingerprint as fingerprint
