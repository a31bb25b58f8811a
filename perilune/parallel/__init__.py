"""Several processes on one model.

mesh: which rank stands where. layout: what of a parameter is on which rank. shard (FSDP2), tensor and tensor_model,
context with slices and fragments (KDA context parallelism), pipeline, expert (balanced experts), muon and checkpoint
over parts; beside: work on another stream.
"""

__all__: list[str] = []
