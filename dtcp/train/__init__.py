"""The training job: ``python -m dtcp.train``, under torchrun or alone, configured by hydra from ``conf/``."""
