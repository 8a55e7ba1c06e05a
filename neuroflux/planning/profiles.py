"""Profiles on disk: a run with the same settings on the same machine plans from what an earlier one measured.

Clocks disagree a little every time, and with them plans. Going by the same profile, the same seed gives the same model.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from neuroflux.inputs.arrays import write_json
from neuroflux.inputs.chain import Chain
from neuroflux.planning.profiler import LayerProfile, Profile

FORMAT = 1


def fingerprint(chain: Chain, device: torch.device, **settings: Any) -> str:
    """Return a name for the profile of `chain` on this machine; `settings` are all else that it depends on."""
    values = {
        "format": FORMAT,
        "layers": [str(layer) for layer in chain.layers],
        "shapes": [chain.input_shape, *chain.shapes],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "machine": [platform.node(), platform.machine(), torch.get_num_threads()],
        "torch": torch.__version__,
        **settings,
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]


def save_profile(profile: Profile, path: Path) -> None:
    """Write `profile` to the JSON file `path`; where that cannot be, the next run measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, profile.to_dict())
    except OSError:
        return


def load_profile(path: Path, chain: Chain) -> Profile | None:
    """Return the profile of `chain` in `path`, or None where there is none that can be used."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        layers = [LayerProfile(**layer) for layer in values.pop("layers")]
        profile = Profile(layers, **values)
        for layer in layers:
            layer.compact_peak, layer.fast_peak = _pair(layer.compact_peak), _pair(layer.fast_peak)
            layer.input_shape, layer.output_shape = tuple(layer.input_shape), tuple(layer.output_shape)
            if not len(layer.batches) == len(layer.compact_seconds) == len(layer.fast_seconds):
                return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return profile if [layer.name for layer in layers] == chain.names else None


def _pair(values: Any) -> tuple[float, float]:
    fixed, per_image = values
    return float(fixed), float(per_image)
