"""A plain PyTorch loop: backpropagation on the same model, data, split, augmentation and schedule.

    python experiments/backprop.py --model vgg16 --data cifar10.npz --limit_train 10000 --epochs 5

It prints the test accuracy after every pass and the seconds of training alone, without validation or testing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from neuroflux.inputs.datasets import Split, augment, open_data
from neuroflux.inputs.models import build_model, input_channels
from neuroflux.inputs.preprocess import Preprocess
from neuroflux.planning.memory import CpuMeter, set_allocator, warm_up
from neuroflux.training.block import rate


def accuracy(model: nn.Module, preprocess: Preprocess, split: Split) -> float:
    """Return the share of `split` that `model` classifies rightly."""
    model.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(split), 250):
            rows = np.arange(start, min(start + 250, len(split)))
            right += int((model(preprocess(split.read(rows))).argmax(1).numpy() == split.labels[rows]).sum())
    model.train()
    return right / len(split)


def main() -> None:
    """Train and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--data", required=True)
    parser.add_argument("--data_root", default="~/.cache/neuroflux")
    parser.add_argument("--limit_train", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test_every", action="store_true", help="test after every pass, not only after the last")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    set_allocator(compact=False)
    warm_up()
    meter = CpuMeter()
    root = Path(args.data_root).expanduser()
    data = open_data(args.data, root=root, seed=args.seed, limit_train=args.limit_train)
    assert data.test is not None
    size, channels = data.shape[1], input_channels(args.model, data.shape[1], data.shape[0])
    torch.manual_seed(args.seed)
    model = build_model(args.model, num_classes=len(data.classes), in_channels=channels, image_size=size)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    preprocess = Preprocess(data.mean, data.std, channels)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 5e-4},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True, fused=True)
    generator = torch.Generator().manual_seed(args.seed)
    seconds, history = 0.0, []
    for epoch in range(args.epochs):
        start = time.perf_counter()
        order = torch.randperm(len(data.train), generator=generator).numpy()
        for at in range(0, len(order) - 1, args.batch):
            rows = order[at : at + args.batch]
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate((epoch + at / len(order)) / args.epochs)
            images = preprocess(augment(data.train.read(rows), data.augment, generator))
            loss = F.cross_entropy(
                model(images.contiguous(memory_format=memory_format)), torch.from_numpy(data.train.labels[rows])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds += time.perf_counter() - start
        peak = meter.peak()
        if args.test_every or epoch == args.epochs - 1:
            history.append({"pass": epoch + 1, "seconds": seconds, "test": accuracy(model, preprocess, data.test)})
            print(json.dumps(history[-1]), flush=True)
    result = {**vars(args), "json": None, "history": history, "peak": peak, "seconds": seconds}
    print(json.dumps(result, default=str))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
