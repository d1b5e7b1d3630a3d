"""What the model configs have in common: checks with a cure, and the count of floating-point operations."""


def check_positive(**values: object) -> None:
    """Raise ``ValueError`` naming the first value that is not a positive int."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def check_fraction(**values: float) -> None:
    """Raise ``ValueError`` naming the first value outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def check_divides(divisor_name: str, divisor: int, name: str, value: int) -> None:
    """Raise ``ValueError`` unless ``divisor`` divides ``value``; names the nearest divisors of ``value``."""
    if value % divisor:
        near = [d for d in range(1, value + 1) if value % d == 0]
        near.sort(key=lambda d: abs(d - divisor))
        raise ValueError(
            f"{divisor_name} must divide {name}, got {divisor_name}={divisor} and {name}={value}; "
            f"nearest that work: {divisor_name}={' or '.join(str(d) for d in near[:2])}"
        )


def check_window(window_size: int | None, full_attention_every: int) -> None:
    """Raise ``ValueError`` unless these say which layers see how much."""
    if window_size is not None:
        check_positive(window_size=window_size)
    if not isinstance(full_attention_every, int) or isinstance(full_attention_every, bool) or full_attention_every < 0:
        raise ValueError(f"full_attention_every must be an integer >= 0, got {full_attention_every!r}; 0: no layer")
    if full_attention_every and window_size is None:
        raise ValueError(
            f"full_attention_every={full_attention_every} is for layers with a window between, got window_size=None: "
            "every layer is full; set window_size, or full_attention_every=0"
        )
    if full_attention_every == 1:
        raise ValueError(
            f"full_attention_every=1 makes every layer full, and window_size={window_size} would mean nothing; use 2 "
            "or more, or window_size=None"
        )


def window_of_layer(index: int, window_size: int | None, full_attention_every: int) -> tuple[int, int]:
    """Return the window (left, right) of a layer, as flash attention has it; (-1, -1) is none.

    Args:
        index: Of the layer, from 0.
        window_size: Tokens that a token sees, itself and the last ones before it; None: all.
        full_attention_every: Layers n - 1, 2n - 1, … see all, as in Gemma 3 (6) and GPT-OSS (2); 0: none of them.
    """
    is_full = window_size is None or (full_attention_every > 0 and (index + 1) % full_attention_every == 0)
    return (-1, -1) if is_full or window_size is None else (window_size - 1, 0)


def training_flops_per_token(
    num_matmul_parameters: int,
    num_layers: int,
    attention_dim: int,
    seq_len: int,
    *,
    window_size: int | None = None,
    full_attention_every: int = 0,
) -> int:
    """Return the floating-point operations of one token, forward and backward, in a causal model.

    ``6 N + 6 L A S``: N parameters that multiply activations, L layers, A = heads x head dim, S = seq_len.
    A multiply-add is two operations and the backward costs twice the forward: 6 per parameter (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1). QK^T and PV cost 4 A per key forward and 12 A with the backward, so 12 L A S (PaLM,
    arXiv:2204.02311, appendix B); under a causal mask a token sees S/2 keys on average, which halves it. Recomputation
    is not counted. With a window of W < S tokens it is W - W^2 / 2S keys.
    """
    windows = [window_of_layer(i, window_size, full_attention_every)[0] + 1 or seq_len for i in range(num_layers)]
    twice_keys = sum((min(w, seq_len) * (2 * seq_len - min(w, seq_len))) // seq_len for w in windows)
    return 6 * num_matmul_parameters + 6 * attention_dim * twice_keys
