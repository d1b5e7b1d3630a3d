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


def training_flops_per_token(num_matmul_parameters: int, num_layers: int, attention_dim: int, seq_len: int) -> int:
    """Return the floating-point operations of one token, forward and backward, in a causal model.

    ``6 N + 6 L A S``: N parameters that multiply activations, L layers, A = heads x head dim, S = seq_len.
    A multiply-add is two operations and the backward costs twice the forward: 6 per parameter (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1). QK^T and PV cost 4 A per key forward and 12 A with the backward, so 12 L A S (PaLM,
    arXiv:2204.02311, appendix B); under a causal mask a token sees S/2 keys on average, which halves it. Recomputation
    is not counted.
    """
    return 6 * num_matmul_parameters + 6 * num_layers * attention_dim * seq_len
