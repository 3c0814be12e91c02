"""What a resumed run must share with its snapshot, and what may change on the way."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from course_lib.engine.order import Plan
from course_lib.engine.snapshots import Manifest, cpu_model, gpu_model
from course_lib.engine.state import TrainState
from course_lib.engine.tree import digest, portable
from course_lib.engine.world import World


class Identity:
    """The job as a snapshot records it: `fixed` is what it must share, `settings` what may change.

    Raises TypeError for what a snapshot or its manifest cannot hold.
    """

    def __init__(self, state: TrainState, plan: Plan, given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._module = state.module
        own = {
            "parameters": digest(_shapes(self._module.state_dict())),
            "optimizer": type(state.optimizer).__name__,
            "scheduler": type(state.scheduler).__name__,
            **asdict(plan),
        }
        self.fixed: dict[str, Any] = portable(own | dict(given), "identity")
        self.settings: dict[str, Any] = portable(dict(settings), "settings")
        self.config = self.fixed | self.settings
        json.dumps(self.config)  # it goes into the manifests: better to fail here than at a save

    def differences(self, content: Mapping[str, Any]) -> list[str]:
        """In what a snapshot's content is of another job, a phrase each."""
        there = _in_words(content["identity"], content["state"].get("model", {}))
        here = _in_words(self.fixed, self._module.state_dict())
        return [
            f"{key} {there.get(key, 'nothing')} there, {here.get(key, 'nothing')} here"
            # What was asked for comes before the shapes that follow from it.
            for key in sorted(set(there) | set(here), key=lambda key: (key.startswith("model."), key))
            if there.get(key) != here.get(key)
        ]

    def changes(self, content: Mapping[str, Any], manifest: Manifest, world: World) -> list[str]:
        """What may change at a resume and did, a sentence each."""
        saved = content["settings"]
        notes = [
            f"{key.replace('_', ' ')} {saved[key]} -> {value}"
            for key, value in self.settings.items()
            if key in saved and saved[key] != value
        ]
        if manifest.world_size != world.world_size:
            size = self.fixed["global_batch_size"]
            notes.append(f"ranks {manifest.world_size} -> {world.world_size}, the global batch stays {size}")
        here = {"cpu": cpu_model(), "gpu": gpu_model(), "torch": torch.__version__}
        machine = {"gpu": "none"} | manifest.machine
        there = {"cpu": machine.get("cpu"), "gpu": machine["gpu"], "torch": manifest.versions.get("torch")}
        for key in here:
            if here[key] != there[key]:
                notes.append(f"{key} {there[key]} -> {here[key]}: the bits may part from here on")
        return notes


def _shapes(model: Mapping[str, Any]) -> dict[str, str]:
    """Type and shape of each parameter and buffer in a module's state."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        for name, value in model.items()
        if isinstance(value, torch.Tensor)
    }


def _in_words(identity: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader can compare: the parameters' shapes stand in place of their digest."""
    words = {key.replace("_", " "): value for key, value in identity.items() if key != "parameters"}
    return words | {f"model.{name}": shape for name, shape in _shapes(model).items()}
