"""`perilune train --memory-report`: one step of a run under its memory plan, predicted and counted."""

from __future__ import annotations

from torch import Tensor

from perilune.memory.census import Census
from perilune.memory.plan import Plan
from perilune.memory.profile import predict, profile
from perilune.memory.report import render
from perilune.model import Stats
from perilune.train.config import TrainConfig
from perilune.train.loss import cross_entropy
from perilune.train.trainer import Trainer


def memory_report(config: TrainConfig) -> str:
    """The table of `perilune.memory.report.render` for the run's first micro-batch; nothing is trained or saved.

    Takes the memory of a step without a plan, once, for the prediction. Raises Error as `Trainer`.
    """
    trainer = Trainer(config)
    try:
        model, device = trainer.model, trainer.device
        batch = next(trainer.data).to(device)
        inputs = [batch.tokens_T, batch.targets_T, batch.mask_T, batch.sequences.cu_seqlens]
        weights = [*model.parameters(), *model.buffers(), *inputs]

        def forward() -> Tensor:
            x_TD = model.hidden(batch.tokens_T, batch.sequences, stats=Stats()).x_TD
            return cross_entropy(x_TD, model.lm_head.weight, batch.targets_T, batch.mask_T, config.loss_chunk)[0]

        model.train()
        # Twice: the first one also builds kernels and caches.
        forward()
        noted = profile(forward, weights, device)
        plan = trainer.activations.plan(forward) if config.memory.plan != "none" else Plan()
        predicted = predict(noted, plan)
        memory = trainer.activations.manager(plan, inputs)
        stores = [store for store in memory.stores.values() if store is not None]
        with memory.step():
            with Census(device) as census:
                loss = forward()
                alive = census.alive() - loss.nbytes
            loss.backward()
        if device.type == "cpu":
            # The host store lies on the same device.
            alive -= sum(row.stored for row in predicted.values() if "host" in row.placement)
        return render(predicted, memory.rows, alive, noted, sum(store.waited for store in stores))
    finally:
        trainer.close()


__all__ = ["memory_report"]
