"""Judges a run of the GPU benchmark against other implementations on the same card."""

from collections.abc import Iterator

from benchmark_gpu import CACHED, GATED_TOKENS, PROJECTED_TOKENS, TOKENS, kernel_result
from benchmark_host_tables import PINNED_TOKENS
from benchmark_record import Result


def compare(
    results: list[Result], peers: dict[str, dict[str, dict[str, float]]]
) -> Iterator[Result]:
    """Judge a run against other implementations, measured on the same card.

    Args:
        results: of the suites.
        peers: microseconds by operation ("hash", "lookup", "gate", "wkv_bf16",
            "lookup_host"),
            implementation ("vllm", "sglang", "cublas") and T as a string.

    Yields:
        The peers' times; ratios to them and shares of the card's copy rate, each with
        what is required of it.
    """
    measured = {r.detail.get("operation") for r in results}
    for operation, by_peer in peers.items():
        name = {"wkv_bf16": "wkv"}.get(operation, operation)
        if operation == "copy" or name not in measured:
            continue
        for who, by_tokens in by_peer.items():
            for tokens, time_us in by_tokens.items():
                yield kernel_result(name, who, int(tokens), [time_us])
    times = {
        (r.detail["operation"], r.detail["variant"], r.detail["tokens"]): r
        for r in results
        if "operation" in r.detail
    }

    def us(operation, variant, tokens):
        found = times.get((operation, variant, tokens))
        return None if found is None else found.value

    def ratio(name, own, other, limit=None):
        if own is not None and other is not None:
            yield Result("peers", name, own / other, "x", at_most=limit)

    def peer(operation, who, tokens):
        return peers.get(operation, {}).get(who, {}).get(str(tokens))

    copy = times.get(("copy", "xla", 0))

    def share_of_copy(operation, tokens, least):
        found = times.get((operation, "pallas", tokens))
        if copy is not None and found is not None:
            share = found.detail["GB/s"] / copy.detail["GB/s"]
            name = f"{operation}: share of the copy rate, T = {tokens}"
            yield Result("peers", name, share, "x", at_least=least)

    for tokens in TOKENS:
        at = f", T = {tokens}"
        hashed, read = (us(n, "pallas", tokens) for n in ("hash", "lookup"))
        yield from ratio(f"hash / vLLM{at}", hashed, peer("hash", "vllm", tokens), 0.8)
        # SGLang's kernel was measured on ids that vLLM's had just read.
        cached = us("lookup", CACHED, tokens)
        limit = 1.0 if tokens <= 64 else None
        name = f"lookup (rows in cache) / SGLang{at}"
        yield from ratio(name, cached, peer("lookup", "sglang", tokens), limit)
        limit = {512: 0.40, 4096: 0.30, 16384: 0.30}.get(tokens)
        name = f"lookup / vLLM{at}"
        yield from ratio(name, read, peer("lookup", "vllm", tokens), limit)
        if tokens >= 4096:
            yield from share_of_copy("lookup", tokens, 0.75)
        limit = 0.8 if tokens == 4096 else None
        packed = us("lookup_packed", "pallas", tokens)
        yield from ratio(f"lookup_packed / lookup{at}", packed, read, limit)
    for tokens in PINNED_TOKENS:
        own, other = (
            us("lookup_host", CACHED, tokens),
            peer("lookup_host", "sglang", tokens),
        )
        limit = 1.0 if tokens <= 16 else None
        name = f"lookup from pinned memory (rows in cache) / SGLang, T = {tokens}"
        yield from ratio(name, own, other, limit)
    for tokens in PROJECTED_TOKENS:
        at = f", T = {tokens}"
        limit = 0.57 if tokens <= 16 else 0.70 if tokens <= 64 else 1.03
        cublas = peer("wkv_bf16", "cublas", tokens) or us("wkv", "library", tokens)
        for variant in ("auto", "ordered"):
            # Few tokens' rows come in order; the time to order others is shown, too.
            judged = variant == "ordered" or tokens > 64
            yield from ratio(
                f"wkv ({variant}) / cuBLAS bfloat16{at}",
                us("wkv", variant, tokens),
                cublas,
                limit if judged else None,
            )
    for tokens in GATED_TOKENS:
        gate = us("gate", "pallas", tokens)
        other = peer("gate", "sglang", tokens)
        yield from ratio(f"gate / SGLang, T = {tokens}", gate, other, 1.0)
        if tokens >= 4096:
            yield from share_of_copy("gate", tokens, 0.95)
    for tokens in (1, 16):
        step = us("decode_async", "auto", tokens)
        alone = us("decode_kernels", "auto", tokens)
        name = f"decode step, asynchronous loop / its kernels, T = {tokens}"
        yield from ratio(name, step, alone, 1.10)
        if step is not None:
            name = f"decode step, asynchronous loop, T = {tokens}"
            yield Result("peers", name, step, "us", at_most=110.0)
    best = [
        min(peers.get(op, {}).get(who, {}).get("4096", float("nan")) for who in whose)
        for op, whose in (
            ("hash", ("vllm", "sglang")),
            ("lookup", ("vllm", "sglang")),
            ("gate", ("vllm", "sglang")),
            ("wkv_bf16", ("cublas",)),
        )
    ]
    without = best[0] + 2 * best[1] + 2 * best[2]
    yield from ratio(
        "hash, rows and gate of two layers / best of each peer, T = 4096",
        us("prefill_without_projection", "auto", 4096),
        without,
        0.80,
    )
    yield from ratio(
        "hash to output of two layers / best of each peer and cuBLAS, T = 4096",
        us("prefill", "auto", 4096),
        without + 2 * best[3],
        0.98,
    )
