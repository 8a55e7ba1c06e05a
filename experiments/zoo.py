"""The zoo: whether torchvision's and timm's CNNs split into layers that compute what the model computes.

    python experiments/zoo.py                       # torchvision, and timm where it is installed
    python experiments/zoo.py --models resnet18,timm:resnet18d

For every model: its layers, its parameters, whether the chain's scores equal the model's in evaluation, and scores and
gradients in training under the same seed, to the last bit. Writes zoo.json and zoo.md beside itself; models that are in
zoo.json already are not tried again.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.arrays import write_json
from neuroflux.inputs.chain import Chain, trace_chain
from neuroflux.inputs.models import TRANSFORMERS, build_model
from neuroflux.results.comparison import machine
from neuroflux.results.report import table

SIZE, CLASSES, IMAGES = 96, 10, 2
TIMM = (
    "resnet18d resnet26 resnetv2_50 seresnet50 ecaresnet26t regnetx_002 regnety_002 regnetz_005 mobilenetv3_small_100 "
    "mobilenetv4_conv_small mobilenetv2_050 efficientnet_lite0 efficientnet_b0 tf_efficientnetv2_b0 mixnet_s "
    "mnasnet_small fbnetc_100 spnasnet_100 ghostnet_100 hardcorenas_a lcnet_050 tinynet_e semnasnet_075 rexnet_100 "
    "densenet121 convnext_atto convnextv2_atto repvgg_a0 dla34 res2net50_14w_8s cspresnet50 darknet53 hrnet_w18_small "
    "vovnet39a selecsls42 xception41 inception_v4 nf_regnet_b0 edgenext_xx_small repghostnet_050"
)


def forward(chain: Chain, images: torch.Tensor) -> torch.Tensor:
    """Return the scores of the chain."""
    for layer in chain.layers:
        images = layer(images)
    return chain.classifier(images)


def trained(run: Any, model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Return the scores of `run` in training, and all gradients of their sum of squares."""
    model.zero_grad()
    torch.manual_seed(1)
    scores = run(images)
    scores.square().sum().backward()
    return [scores.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether two lists of tensors are the same to the last bit."""
    return len(first) == len(second) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)
    )


def examine(name: str) -> dict[str, Any]:
    """Return what is found out about the model `name`."""
    torch.manual_seed(0)
    images = torch.rand(IMAGES, 3, SIZE, SIZE)
    try:
        model = build_model(name, num_classes=CLASSES, in_channels=3, image_size=SIZE)
        chain = trace_chain(model, (3, SIZE, SIZE))
    except NeuroFluxError as error:
        return {"name": name, "error": str(error)}

    def run(values: torch.Tensor) -> torch.Tensor:
        return forward(chain, values)

    parts = [*chain.layers, chain.classifier]
    for part in (model, *parts):
        part.eval()
    with torch.no_grad():
        evaluation = equal([model(images)], [run(images)])
    for part in (model, *parts):
        part.train()
    training = equal(trained(model, model, images), trained(run, model, images))
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "name": name,
        "layers": len(chain.layers),
        "parameters": parameters,
        "evaluation": evaluation,
        "training": training,
    }


def names() -> list[str]:
    """Return torchvision's CNNs, and some of timm's where it is installed."""
    found = [
        f"torchvision:{name}"
        for name in torchvision.models.list_models(module=torchvision.models)
        if not name.startswith(TRANSFORMERS)
    ]
    try:
        import timm
    except ImportError:
        return found
    known = set(timm.list_models())
    return found + [f"timm:{name}" for name in TIMM.split() if name in known]


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """Write the results as JSON and as a table."""
    write_json(path.with_suffix(".json"), {"machine": machine(), "models": found})
    rows = [
        [one["name"], "", "", "", one["error"][:120]]
        if "error" in one
        else [
            one["name"],
            str(one["layers"]),
            f"{one['parameters']:,}",
            "equal" if one["evaluation"] else "DIFFERS",
            "equal" if one["training"] else "DIFFERS",
        ]
        for one in found
    ]
    same = sum(bool(one.get("evaluation") and one.get("training")) for one in found)
    text = (
        f"`python experiments/zoo.py`: {same} of {len(found)} models compute the same as a chain, to the last bit, in "
        f"evaluation (scores) and in training (scores and gradients), on {IMAGES} images of {SIZE} pixels.\n\n"
    )
    header = ["model", "layers", "parameters", "evaluation", "training"]
    path.with_suffix(".md").write_text(text + table(header, rows) + "\n", encoding="utf-8")


def main() -> None:
    """Examine what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="names, separated by commas (default: all)")
    given = parser.parse_args()
    path = Path(__file__)
    kept = path.with_suffix(".json")
    found = json.loads(kept.read_text(encoding="utf-8"))["models"] if kept.exists() and not given.models else []
    done = {one["name"] for one in found}
    for name in given.models.split(",") if given.models else names():
        if name in done:
            continue
        found.append(examine(name))
        print(found[-1], flush=True)
        gc.collect()
        if not given.models:
            write(path, found)


if __name__ == "__main__":
    main()
