"""vLLM's weight transfer over gloo: a weight transfer engine for each worker, in the interface of vLLM 0.26 and 0.32.

A worker learns of it by importing this module, which `WorkerExtension` makes it do, in whichever process it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf_core.engines.transfer.gloo import GlooReceiver
from rlhf_core.engines.transfer.weights import Written, direct_writes, pack_experts_at_next_load, pack_tied_weights, write_weights
from rlhf_core.engines.vllm import worker

NAME = "gloo"


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """See `GlooLink.info`."""

    meeting: dict[str, Any]
    layers: list[list[tuple[str, str, tuple[int, ...]]]]
    made: list[list[tuple[tuple[str, str, tuple[int, ...]], float | None, bool]]]
    changes: bool


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """layer: number of the layer that is received."""

    layer: int


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives a layer at a time into the host's memory, and loads it into this worker's model.

    On the CPU, weights of the models in STACKING_MODELS are written in place; vLLM's layerwise reload loads all others.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _receiver: GlooReceiver | None = None
    _writes: list[list[Written]] | None = None  # of each layer; None: vLLM's reload

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender. A second call, after a replacement of the sender or of this engine's connection, joins anew."""
        self._receiver = GlooReceiver(vars(init_info), worker=self.parallel_config.rank, folder=self.model_config.model)
        self._writes = self._direct_writes() if self.device.type == "cpu" else None

    def _direct_writes(self) -> list[list[Written]] | None:
        specs = self._receiver.specs
        written = direct_writes(self.model, {spec.name: spec.shape for layer in specs for spec in layer})
        if written is None:
            return None
        by_weight = {name: parameter for parameter in written for name in parameter.weights}
        found = [list(dict.fromkeys(by_weight[s.name] for s in layer if s.name in by_weight)) for layer in specs]
        return found if sum(map(len, found)) == len(written) else None  # a stack of several layers' weights is left to vLLM

    def start_weight_update(self) -> None:
        if self._writes is None:
            if self.device.type == "cpu":
                pack_experts_at_next_load(self.model)
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load a layer, without the base class's synchronization, which needs an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        layer = self._receiver.receive(update_info.layer)
        if self._writes is None:
            self.model.load_weights(layer.items())
        else:
            write_weights(self._writes[update_info.layer], layer)

    def finish_weight_update(self) -> None:
        if self._writes is None:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_tied_weights(self.model)

    def shutdown(self) -> None:
        self._receiver = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise NotImplementedError, since `WeightSender` sends; vLLM 0.26's interface has this method."""
        raise NotImplementedError("gloo weight transfer: expected weights from a WeightSender, got vLLM's own sender")


class WorkerExtension(worker.WorkerExtension):
    """See `worker`."""


if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, GlooWeightTransferEngine)
