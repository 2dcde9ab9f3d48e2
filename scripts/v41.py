"""The sizes of DeepSeek-V4.1-Flash's Engram layers, as its config.json gives them."""

V41_CONFIG = {
    "hidden_size": 5120,
    "hc_mult": 4,
    "rms_norm_eps": 1e-20,
    "vocab_size": 129280,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}
