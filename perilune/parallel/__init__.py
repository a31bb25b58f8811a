"""Several processes on one model. `perilune.parallel.expert`: balanced expert parallelism."""

__all__: list[str] = []
