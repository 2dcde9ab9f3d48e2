"""The operations: each a function with an XLA form and a GPU kernel."""

from .dispatch import Backend as Backend
from .dispatch import device_reason as device_reason
from .gate import gate as gate
from .gate import gate_values as gate_values
from .ids import OUTSIDE as OUTSIDE
from .ids import narrow_ids as narrow_ids
from .lookup import lookup as lookup
from .lookup import lookup_layers as lookup_layers
from .lookup import lookup_packed as lookup_packed
from .lookup import read_columns as read_columns
from .ngram_hash import ngram_hash as ngram_hash
from .ngram_rows import ngram_rows as ngram_rows
from .ngram_rows import reads_at_once as reads_at_once
from .peer_lookup import RECORD_WORDS as RECORD_WORDS
from .peer_lookup import make_record as make_record
from .peer_lookup import peer_lookup as peer_lookup
from .record_lookup import record_lookup as record_lookup
from .wkv import OrderedRows as OrderedRows
from .wkv import dequantize_weight as dequantize_weight
from .wkv import quantize_weight as quantize_weight
from .wkv import wkv as wkv
