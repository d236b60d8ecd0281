"""The tensors of a vLLM worker: what the model's own loader puts where, and how staged content becomes what it serves.

Written against `vllm.model_executor.model_loader.reload` of 0.32, the functions that vLLM's own shard-to-shard backend
uses. vLLM recorded every module's tensors as the loader meets them, before any post-processing: the *load format*.
Staging has that format. A module at a time is brought back to it, filled, processed as after a load, and copied into
the tensors that it serves from, whose addresses stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _copy_and_restore_kernel_tensors,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm.platforms import current_platform

from ..errors import Misuse
from ..memory import Staging
from ..pytorch import TORCH_DTYPES, read_only
from ..recording import complete
from ..tensor import Group, GroupClass, Tensor
from ..tracing import Tracing

logger = logging.getLogger("weightrefit")


class LiveModel:
    """One worker's model.

    Attributes:
        tensors: what to register, once `record` has run.
        groups: the same by module, in the order in which they are applied.
        explained: tensors of the model that no version changes, with the reason.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, device: torch.device):
        self._model, self._model_config, self._device = model, model_config, device
        self.tensors: list[Tensor] = []
        self.groups: list[Group] = []
        self.explained: dict[str, str] = {}
        # Name of a parameter -> all modules that hold it, with its name there: tied ones are staged once.
        self._places: dict[str, list[tuple[torch.nn.Module, str]]] = {}
        # Modules in another form than their load format, or that are processed after a load.
        self._processed: dict[torch.nn.Module, GroupClass] = {}

    @torch.no_grad()
    def record(self, checkpoint: Iterable[Tensor]) -> list[Tensor]:
        """Runs the model's loader on tensors without content. The model is as before when this returns.

        Args:
            checkpoint: all tensors of the checkpoint that the engine was started on, by name, dtype and shape.

        Raises:
            Misuse: a tensor of the engine that would get nothing, or a loader that does more than copy.
        """
        tracing = Tracing()
        with self._on_meta() as tensors:
            self._find_places(tensors, tracing)
            sources = [(t.name, tracing.source(t.name, t.shape, TORCH_DTYPES[t.dtype])) for t in checkpoint]
            with tracing:
                self._model.load_weights(iter(sources))
        recorded = tracing.recorded
        buffers = [name for name, each in recorded.items() if name in self._buffers and not each.pieces]
        self.explained.update({name: "a buffer that no checkpoint has: the engine makes it itself" for name in buffers})
        unused = [name for name, _ in sources if name not in tracing.used]
        self.tensors = complete(recorded.values(), self.explained, unused)
        self.groups = self._grouped()
        for name, reason in self.explained.items():
            logger.debug("`%s` stays as it is: %s", name, reason)
        return self.tensors

    def begin(self) -> None:
        """Brings the model to the load format; until `finish` it cannot run."""
        initialize_layerwise_reload(self._model)

    def finish(self) -> None:
        """Ends what `begin` began: modules that were not applied get back what they had."""
        quiet = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level, _ = quiet.level, quiet.setLevel(logging.ERROR)  # it warns of each module that has nothing to load
        try:
            finalize_layerwise_reload(self._model, self._model_config)
        finally:
            quiet.setLevel(level)

    def abort(self) -> None:
        """Puts every module that was not applied back on its old tensors."""
        for module in self._model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(module, info)
                info.reset()

    @torch.no_grad()
    def apply(self, staging: Staging) -> None:
        """Makes staged content what the model serves, group by group. After `begin`.

        Raises:
            Misuse: `PointerMoved`, where the engine's processing left a module other tensors than before.
        """
        tensors = {tensor.name: tensor for tensor in self.tensors}
        with self._device:
            for group in staging.groups():
                modules: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
                for name, staged in group.items():
                    tensor = tensors[name]
                    content = read_only(staged, TORCH_DTYPES[tensor.dtype]) if tensor.nbytes else torch.empty(0)
                    for module, key in self._places[name]:
                        modules.setdefault(module, {})[key] = content.view(tensor.shape)
                for module, contents in modules.items():
                    if group.kind is GroupClass.DIRECT:
                        self._copy(module, contents)
                    else:
                        self._process(module, contents)

    def _grouped(self) -> list[Group]:
        """Tensors of one module are one group; so are modules that share one."""
        groups: list[list[str]] = []
        of: dict[torch.nn.Module, list[str]] = {}
        for tensor in self.tensors:
            modules = [module for module, _ in self._places[tensor.name]]
            joined = [of[module] for module in modules if module in of]
            names = joined[0] if joined else []
            if not joined:
                groups.append(names)
            for other in joined[1:]:
                if other is not names:
                    groups.remove(other)
                    names += other
                    of.update({module: names for module in of if of[module] is other})
            names.append(tensor.name)
            of.update(dict.fromkeys(modules, names))
        kinds: dict[int, set[GroupClass]] = {id(names): set() for names in groups}
        for module, names in of.items():
            kinds[id(names)].add(self._processed.get(module, GroupClass.DIRECT))
        most = (GroupClass.APPLY, GroupClass.DERIVED, GroupClass.DIRECT)
        return [
            Group(names[0].rpartition(".")[0] or names[0], next(kind for kind in most if kind in kinds[id(names)]), tuple(names))
            for names in groups
        ]

    def _copy(self, module: torch.nn.Module, contents: Mapping[str, torch.Tensor]) -> None:
        """What it serves from has the load format, and nothing is made of it."""
        info = get_layerwise_info(module)
        _place_kernel_tensors(module, info)
        info.reset()
        for name, content in contents.items():
            getattr(module, name).data.copy_(content)

    def _process(self, module: torch.nn.Module, contents: Mapping[str, torch.Tensor]) -> None:
        info = get_layerwise_info(module)
        kernel = {**info.kernel_tensors[0], **info.kernel_tensors[1]}
        addresses = {name: tensor.data_ptr() for name, tensor in kernel.items()}
        materialize_layer(module, info)
        for name, buffer in module._buffers.items():
            old = info.kernel_tensors[1].get(name)
            if name not in contents and buffer is not None and old is not None and old is not buffer and old.shape == buffer.shape:
                buffer.copy_(old)
        for name, content in contents.items():
            getattr(module, name).data.copy_(content)
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            before = getattr(method, "moe_kernel", None)
            method.process_weights_after_loading(module)
            if current_platform.is_cpu() and before is not None and method.moe_kernel is before:
                # vLLM 0.32 packs experts for the CPU only when it first makes this kernel.
                before.fused_experts.process_weights_after_loading(module)
            if hasattr(module, "update_param_tp_status"):
                module.update_param_tp_status()
        _copy_and_restore_kernel_tensors(module, info)
        info.reset()
        for name, tensor in kernel.items():
            if getattr(module, name, None) is not tensor or tensor.data_ptr() != addresses[name]:
                raise Misuse("PointerMoved", f"`{name}` of {type(module).__name__} lies elsewhere after it was applied")

    @contextmanager
    def _on_meta(self) -> Iterator[list[tuple[str, torch.nn.Module, str, torch.Tensor, torch.Tensor]]]:
        """The model in its load format, without content; yields (path, module, key, tensor, live tensor)."""
        modules = dict(self._model.named_modules())
        live = {path: {**module._parameters, **module._buffers} for path, module in modules.items()}
        self._buffers = {
            f"{path}.{key}" if path else key for path, module in modules.items() for key in module._buffers
        }
        try:
            for module in modules.values():
                info = get_layerwise_info(module)
                info.kernel_tensors = get_layer_params_buffers(module)
                info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
                restore_layer_on_meta(module, info)
            found = []
            for path, module in modules.items():
                for key, tensor in {**module._parameters, **module._buffers}.items():
                    if tensor is not None:
                        found.append((path, module, key, tensor, live[path].get(key)))
            self._processed = {}
            for _, module, _, tensor, served in found:
                kind = _kind(module, tensor, served)
                if kind is not GroupClass.DIRECT and self._processed.get(module) is not GroupClass.APPLY:
                    self._processed[module] = kind
            yield found
        finally:
            for module in modules.values():
                info = get_layerwise_info(module)
                _place_kernel_tensors(module, info)
                info.reset()

    def _find_places(self, tensors: list[tuple[str, torch.nn.Module, str, torch.Tensor, torch.Tensor]], tracing: Tracing) -> None:
        first: dict[int, str] = {}
        for path, module, key, tensor, live in tensors:
            name = f"{path}.{key}" if path else key
            if key in SKIP_LOAD_TENSORS and name in self._buffers:
                self.explained[name] = "the engine's own map"
                continue
            other = first.setdefault(id(live), name) if live is not None else name
            if other != name:
                self.explained[name] = f"it is `{other}`"
                self._places[other].append((module, key))
                continue
            self._places[name] = [(module, key)]
            tracing.target(name, tensor)


def _kind(module: torch.nn.Module, loaded: torch.Tensor, served: torch.Tensor | None) -> GroupClass:
    """What stands between a tensor as it is loaded and as it is served."""
    if served is None or (loaded.shape, loaded.dtype, loaded.stride()) != (served.shape, served.dtype, served.stride()):
        return GroupClass.APPLY
    processes = getattr(type(getattr(module, "quant_method", None)), "process_weights_after_loading", None)
    idle = processes is None or processes is QuantizeMethodBase.process_weights_after_loading
    return GroupClass.DIRECT if idle and not hasattr(module, "process_weights_after_loading") else GroupClass.DERIVED
