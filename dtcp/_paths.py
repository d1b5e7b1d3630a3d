"""Where the files that come with dtcp are: in a source checkout, and in an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """Return the folder that holds the configuration groups (``config.yaml``, ``model/``, ``data/``, …).

    A source checkout (also installed with ``pip install -e``) keeps them in ``conf/`` beside the package, where they
    are edited; a wheel carries a copy inside the package. The checkout's own are taken where both exist.

    Raises:
        FileNotFoundError: If neither is there, e.g. when the package folder was copied without ``conf/``.
    """
    root = _PACKAGE.parent
    in_checkout, in_wheel = root / "conf", _PACKAGE / "conf"
    # A site-packages folder may hold a stranger's "conf": only one beside our own pyproject.toml is the checkout's.
    if (root / "pyproject.toml").is_file() and in_checkout.is_dir():
        return in_checkout
    if in_wheel.is_dir():
        return in_wheel
    raise FileNotFoundError(
        f"expected dtcp's configuration in {in_checkout} (source checkout) or {in_wheel} (installed wheel), "
        "found neither; reinstall with `pip install --force-reinstall --no-deps dtcp`, "
        "or run from a complete checkout"
    )
