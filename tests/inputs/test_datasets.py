"""Data sets: what was put in comes out, splits never overlap, and bad input is one clear line."""

import hashlib
import itertools
import pickle
import struct
import tracemalloc
import urllib.error
import zipfile

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import IterableDataset, Subset, TensorDataset

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs import datasets
from neuroflux.inputs.datasets import augment, from_torch, open_data


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def everything(split):
    return split.read(np.arange(len(split)))


def numbered(count, shape=(8, 8)):
    """Images that can be told apart: the first two values of image i are i, in base 256."""
    images = np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)
    flat = images.reshape(count, -1)
    flat[:, 0], flat[:, 1] = np.arange(count) // 256, np.arange(count) % 256
    return images


def numbers(split):
    """The numbers of `numbered` greyscale images."""
    flat = everything(split).flatten(1).long()
    return (flat[:, 0] * 256 + flat[:, 1]).tolist()


def npz(path, count=60, classes=3, save=np.savez, **arrays):
    content = {"train_images": numbered(count), "train_labels": (np.arange(count) % classes).astype(np.uint8)}
    save(path, **(content | arrays))
    return str(path)


def fails(match, *arguments, **keywords):
    with pytest.raises(NeuroFluxError, match=match) as caught:
        open_data(*arguments, **keywords)
    assert "\n" not in str(caught.value)


# --- digits ------------------------------------------------------------------------------------------------------


def test_digits(root):
    data = open_data("digits", root=root)
    assert (data.name, data.shape, data.augment, len(data.classes)) == ("digits", (1, 32, 32), "none", 10)
    assert len(data.train) + len(data.val) + len(data.test) == 1797
    assert len(data.test) == 359
    images = everything(data.train)
    assert images.dtype == torch.uint8
    assert images.max() == 255
    assert abs(images.float().mean().item() - data.mean[0]) < 2
    assert abs(images.float().std().item() - data.std[0]) < 2
    for split in (data.train, data.val, data.test):
        counts = np.bincount(split.labels, minlength=10)
        assert counts.max() - counts.min() <= 0.1 * len(split)


def test_the_seed_chooses_val_but_never_test(root):
    first, same, other = (open_data("digits", root=root, seed=seed, limit_test=50) for seed in (0, 0, 1))
    assert torch.equal(everything(first.val), everything(same.val))
    assert not torch.equal(everything(first.val), everything(other.val))
    assert torch.equal(everything(first.test), everything(other.test))


def test_image_size_applies_to_any_source(root, tmp_path):
    assert open_data("digits", root=root, image_size=16).shape == (1, 16, 16)
    path = npz(tmp_path / "x.npz", train_images=np.full((60, 10, 20, 3), 77, np.uint8))
    data = open_data(path, root=root, image_size=16)
    assert data.shape == (3, 16, 16)
    assert (everything(data.train) == 77).all()


# --- splits ------------------------------------------------------------------------------------------------------


def test_splits_are_disjoint_and_complete(root, tmp_path):
    data = open_data(npz(tmp_path / "x.npz", 300), root=root)
    parts = [numbers(split) for split in (data.train, data.val, data.test)]
    assert [len(part) for part in parts] == [240, 30, 30]
    assert sorted(itertools.chain(*parts)) == list(range(300))
    for part, split in zip(parts, (data.train, data.val, data.test), strict=True):
        assert [number % 3 for number in part] == split.labels.tolist()


def test_limits_are_exact_and_balanced(root, tmp_path):
    path = npz(tmp_path / "x.npz", 600)
    data = open_data(path, root=root, limit_train=90, limit_val=30, limit_test=15)
    assert [np.bincount(split.labels).tolist() for split in (data.train, data.val, data.test)] == [
        [30] * 3,
        [10] * 3,
        [5] * 3,
    ]
    assert not set(numbers(data.train)) & set(numbers(data.val))
    assert set(numbers(data.test)) <= set(numbers(open_data(path, root=root).test))


def test_a_small_limit_on_train_still_gives_a_useful_val(root, tmp_path):
    path = npz(tmp_path / "x.npz", 600)
    assert len(open_data(path, root=root, limit_train=90).val) == 100
    assert len(open_data(path, root=root, limit_train=480).val) == 60  # all that 480 leave of 540
    assert len(open_data(path, root=root, limit_train=90, limit_val=300).val) == 300


def test_given_splits_are_kept(root, tmp_path):
    arrays = {f"{part}_images": numbered(n) for part, n in (("val", 7), ("test", 5))}
    labels = {f"{part}_labels": np.arange(n) % 3 for part, n in (("val", 7), ("test", 5))}
    data = open_data(npz(tmp_path / "x.npz", 60, **arrays, **labels), root=root)
    assert (len(data.train), numbers(data.val), numbers(data.test)) == (60, list(range(7)), list(range(5)))


def test_a_subset_reads_the_right_images(root, tmp_path):
    data = open_data(npz(tmp_path / "x.npz"), root=root)
    part = data.train.subset(np.array([5, 2])).subset(np.array([1]))
    assert len(part) == 1
    assert part.labels.tolist() == [data.train.labels[2]]
    assert torch.equal(part.read(np.array([0])), data.train.read(np.array([2])))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 70), st.integers(0, 2))
def test_stratified_choice(labels, count, leave):
    labels = np.array(labels)
    chosen = datasets._stratified(labels, count, np.random.default_rng(0), leave)
    _, sizes = np.unique(labels, return_counts=True)
    most = np.maximum(sizes - leave, 0)
    taken = np.array([np.sum(labels[chosen] == label) for label in np.unique(labels)])
    assert len(np.unique(chosen)) == len(chosen) == min(count, most.sum())
    assert (taken <= most).all()
    if count >= len(sizes):
        assert (taken >= np.minimum(1, most)).all()


@pytest.mark.parametrize("option", [{"limit_train": 0}, {"limit_val": -1}, {"image_size": 4}, {"seed": -1}])
def test_senseless_options(root, option):
    fails(f"{next(iter(option))} is -?\\d; it must be at least", "digits", root=root, **option)


# --- the store ---------------------------------------------------------------------------------------------------


def test_a_store_is_converted_once(root, tmp_path, monkeypatch):
    path = npz(tmp_path / "x.npz")
    first = open_data(path, root=root)
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "_convert", None)
        again = open_data(path, root=root)
    assert torch.equal(everything(first.train), everything(again.train))
    assert (first.mean, first.std, first.classes) == (again.mean, again.std, again.classes)


def test_a_changed_file_is_converted_again(root, tmp_path):
    open_data(npz(tmp_path / "x.npz", 60), root=root)
    data = open_data(npz(tmp_path / "x.npz", 90), root=root)
    assert len(data.train) + len(data.val) + len(data.test) == 90


def damage_info(folder):
    (folder / "info.json").unlink()


def damage_info_text(folder):
    (folder / "info.json").write_text('{"classes"')


def damage_images(folder):
    path = folder / "train_images.npy"
    path.write_bytes(path.read_bytes()[:-1])


def damage_labels(folder):
    np.save(folder / "train_labels.npy", np.zeros(3, np.int64))


@pytest.mark.parametrize("damage", [damage_info, damage_info_text, damage_images, damage_labels])
def test_an_incomplete_or_damaged_store_is_rebuilt(root, tmp_path, damage):
    path = npz(tmp_path / "x.npz")
    before = everything(open_data(path, root=root).train)
    (folder,) = (entry for entry in (root / "stores").iterdir() if entry.is_dir())
    damage(folder)
    after = everything(open_data(path, root=root).train)
    assert torch.equal(before, after)
    assert (folder / "info.json").exists()


def test_a_failed_conversion_leaves_no_store(root, tmp_path):
    folder = images_in(tmp_path / "set", {"a": [(8, 8)], "b": [(8, 8)]})
    (folder / "b" / "z.png").write_bytes((folder / "b" / "0.png").read_bytes()[:-30])
    fails("z.png", str(folder), root=root)
    assert not [entry for entry in (root / "stores").iterdir() if entry.is_dir()]


def test_a_root_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    fails("cannot convert digits into .*choose another data root", "digits", root=tmp_path / "file")


def test_mean_and_std_leave_the_test_images_out(root, tmp_path):
    images = np.zeros((60, 4, 4, 3), np.uint8)
    images[..., 1] = 10
    images[::2, ..., 2] = 200
    path = npz(tmp_path / "x.npz", train_images=images, classes=2)
    data = open_data(path, root=root)
    used = torch.cat([everything(data.train), everything(data.val)]).double()
    np.testing.assert_allclose(data.mean, used.mean((0, 2, 3)))
    np.testing.assert_allclose(data.std, [1, 1, used[:, 2].std(correction=0)])


# --- .npz --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", [(6, 9), (6, 9, 1), (6, 9, 3)])
@pytest.mark.parametrize("column", [False, True])
def test_npz(root, tmp_path, monkeypatch, save, shape, column):
    monkeypatch.setattr(datasets, "CHUNK", 1000)  # so that there are several chunks
    images, labels = numbered(50, shape), np.arange(50) % 2
    path = tmp_path / "x.npz"
    save(path, train_images=images, train_labels=labels[:, None] if column else labels)
    data = open_data(str(path), root=root)
    assert data.shape == (shape[2] if len(shape) == 3 else 1, 6, 9)
    got = torch.cat([everything(split) for split in (data.train, data.val, data.test)]).permute(0, 2, 3, 1)
    assert sorted(image.numpy().tobytes() for image in got) == sorted(image.tobytes() for image in images)


def test_npz_class_names(root, tmp_path):
    assert open_data(npz(tmp_path / "x.npz"), root=root).classes == ["0", "1", "2"]
    path = npz(tmp_path / "y.npz", class_names=np.array(["cat", "dog", "é"]))
    assert open_data(path, root=root).classes == ["cat", "dog", "é"]
    fails("2 class names for 3 classes", npz(tmp_path / "z.npz", class_names=np.array(["a", "b"])), root=root)


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"train_images": np.zeros((60, 8, 8), np.float32)}, "train_images .* is float32; it must be uint8"),
        ({"train_images": np.zeros((60, 64), np.uint8)}, r"train_images .* is \(60, 64\); it must be"),
        ({"train_images": np.zeros((60, 3, 8, 8), np.uint8)}, r"is \(60, 3, 8, 8\); it must be"),
        ({"train_images": np.zeros((0, 8, 8), np.uint8), "train_labels": np.zeros(0, int)}, "it must be"),
        ({"train_images": np.asfortranarray(np.zeros((60, 8, 8), np.uint8))}, "Fortran order"),
        ({"train_images": np.array([None] * 60)}, "Python objects"),
        ({"train_labels": np.array([None] * 60)}, "Python objects"),
        ({"train_labels": np.zeros((60, 14), np.uint8)}, "one label per image"),
        ({"train_labels": np.zeros(60)}, "train_labels .* is float64 .*must be integers"),
        ({"train_labels": np.arange(59) % 2}, "60 train_images but 59 train_labels"),
        ({"train_labels": np.arange(60) % 2 + 1}, "labels of .* are 1, 2; they must be 0, 1"),
        ({"train_labels": np.arange(60) % 2 * 2}, "are 0, 2; they must be 0, 1"),
        ({"train_labels": np.arange(60) % 2 - 1}, "are -1, 0; they must be 0, 1"),
        ({"train_labels": np.zeros(60, int)}, "are 0; .* at least two"),
        ({"val_images": numbered(4)}, "has no val_labels, only train_images, train_labels, val_images"),
        ({"test_images": numbered(4), "test_labels": np.array([0, 1, 2, 3])}, r"\(test\) has the labels 3"),
        ({"test_images": numbered(4, (9, 9)), "test_labels": np.arange(4) % 3}, r"test images .*\(1, 9, 9\)"),
        ({"class_names": np.array([1, 2, 3])}, "class_names .* must be a list of texts"),
    ],
)
def test_bad_npz(root, tmp_path, arrays, match):
    fails(match, npz(tmp_path / "x.npz", **arrays), root=root)


def test_npz_without_the_keys(root, tmp_path):
    np.savez(tmp_path / "x.npz", images=numbered(4), labels=np.zeros(4, int))
    fails(
        "has no train_images and no train_labels, only images, labels; it must hold", str(tmp_path / "x.npz"), root=root
    )


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_cut_npz(root, tmp_path, keep):
    path = tmp_path / "x.npz"
    npz(path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    fails(r"x\.npz is damaged or not an \.npz file", str(path), root=root)


def test_an_npz_with_a_flipped_bit(root, tmp_path):
    path = tmp_path / "x.npz"
    npz(path)
    data = bytearray(path.read_bytes())
    data[1000] ^= 1  # among the images
    path.write_bytes(data)
    fails(r"x\.npz is damaged", str(path), root=root)


def test_an_npz_whose_header_promises_too_much(root, tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for key, descr, shape in (("train_images", "|u1", (10**12, 8, 8)), ("train_labels", "|u1", (10**12,))):
            with archive.open(f"{key}.npy", "w") as file:
                np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    fails("train_images in .* is cut short or damaged", str(path), root=root)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_converting_stays_in_a_little_memory(root, tmp_path, save):
    path = tmp_path / "big.npz"
    count = 13_000
    images = np.zeros((count, 32, 32, 3), np.uint8)  # 40 MB
    images[:, 0, 0, 0] = np.arange(count) % 251
    save(path, train_images=images, train_labels=np.arange(count) % 10)
    del images
    tracemalloc.start()
    try:
        data = open_data(str(path), root=root)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data.train) == count - 2600
    assert peak < 25e6


# --- folders -----------------------------------------------------------------------------------------------------


def images_in(folder, classes, mode="RGB", **save):
    """Write `folder`/class/i.png for each (width, height); image i of a class has the value 10 * i + 5."""
    for name, sizes in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index, size in enumerate(sizes):
            value = 10 * index + 5
            Image.new(mode, size, value if mode == "L" else (value,) * 3).save(folder / name / f"{index}.png", **save)
    return folder


SMALL = [(8, 8)] * 10


def test_a_folder_of_classes(root, tmp_path):
    folder = images_in(tmp_path / "pets", {"dog": SMALL, "cat": SMALL, "emu": SMALL})
    (folder / "dog" / "notes.txt").write_text("not an image")
    (folder / ".cache").mkdir()
    (folder / "README").write_text("")
    data = open_data(str(folder), root=root)
    assert (data.name, data.classes, data.shape, data.augment) == (
        "pets",
        ["cat", "dog", "emu"],
        (3, 8, 8),
        "flip+crop",
    )
    assert [len(split) for split in (data.train, data.val, data.test)] == [24, 3, 3]
    values = [everything(split)[:, 0, 0, 0].tolist() for split in (data.train, data.val, data.test)]
    assert sorted(itertools.chain(*values)) == sorted([10 * i + 5 for i in range(10)] * 3)


def test_a_folder_with_splits(root, tmp_path):
    classes = {"a": SMALL, "b": SMALL}
    for part, some in (("train", classes), ("val", {"a": [(8, 8)]}), ("test", {"b": [(8, 8)] * 2})):
        images_in(tmp_path / "set" / part, some)
    data = open_data(str(tmp_path / "set"), root=root)
    assert [len(split) for split in (data.train, data.val, data.test)] == [20, 1, 2]
    assert (data.val.labels.tolist(), data.test.labels.tolist()) == ([0], [1, 1])


def test_a_folder_with_only_train(root, tmp_path):
    images_in(tmp_path / "set" / "train", {"a": SMALL, "b": SMALL})
    data = open_data(str(tmp_path / "set"), root=root)
    assert [len(split) for split in (data.train, data.val, data.test)] == [16, 2, 2]


def only(root, folder, **options):
    """Open a folder whose classes are 'a', under test, and 'b'; return the first image of 'a' and the data."""
    data = open_data(str(folder), root=root, **options)
    for split in (data.train, data.val, data.test):
        for index in np.flatnonzero(split.labels == 0):
            image = split.read(np.array([index]))[0]
            if image.float().mean() not in (5, 15):  # not one that images_in made
                return image, data
    raise AssertionError


def make_class(folder, image, suffix="png", **save):
    images_in(folder, {"a": [(16, 16)] * 3, "b": [(16, 16)] * 3}, "L")
    image.save(folder / "a" / f"x.{suffix}", **save)
    for index in (1, 2):
        (folder / "a" / f"{index}.png").unlink()
    return folder


def half(mode, left, right):
    image = Image.new(mode, (16, 16), left)
    image.paste(right, (8, 0, 16, 16))
    return image


def sixteen_bit():
    values = np.full((16, 16), 257 * 100, np.uint16)
    values[:, 8:] = 65535
    return Image.fromarray(values)


def palette():
    image = half("P", 0, 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    return image


@pytest.mark.parametrize(
    ("image", "suffix", "left", "right"),
    [
        (half("L", 100, 200), "png", [100], [200]),
        (half("1", 0, 1), "png", [0], [255]),
        (sixteen_bit(), "png", [100], [255]),
        (sixteen_bit(), "tiff", [100], [255]),
        (half("LA", (100, 255), (200, 0)), "png", [100], [0]),
        (half("RGB", (1, 2, 3), (4, 5, 6)), "png", [1, 2, 3], [4, 5, 6]),
        (half("RGB", (1, 2, 3), (4, 5, 6)), "ppm", [1, 2, 3], [4, 5, 6]),
        (half("RGBA", (90, 80, 70, 255), (90, 80, 70, 0)), "png", [90, 80, 70], [0, 0, 0]),
        (palette(), "png", [10, 20, 30], [40, 50, 60]),
        (half("CMYK", (0, 0, 0, 255), (0, 0, 0, 0)), "tiff", [0, 0, 0], [255, 255, 255]),
    ],
)
def test_image_modes(root, tmp_path, image, suffix, left, right):
    got, data = only(root, make_class(tmp_path / "set", image, suffix))
    assert data.shape == (len(left), 16, 16)
    assert got[:, 5, 3].tolist() == left
    assert got[:, 5, 12].tolist() == right


def test_exif_orientation_is_applied(root, tmp_path):
    exif = Image.Exif()
    exif[274] = 3  # upside down
    got, _ = only(root, make_class(tmp_path / "set", half("L", 100, 200), "png", exif=exif))
    assert (got[0, 5, 3], got[0, 5, 12]) == (200, 100)


def test_mixed_sizes_become_the_centre_square_near_the_median(root, tmp_path):
    wide = Image.new("L", (300, 100), 50)
    wide.paste(150, (100, 0, 200, 100))
    folder = images_in(tmp_path / "set", {"a": [(90, 100)], "b": [(100, 100), (100, 200), (110, 100)]}, "L")
    wide.save(folder / "a" / "x.png")
    got, data = only(root, folder)
    assert data.shape == (1, 96, 96)
    assert (got[:, :, 2:-2] == 150).all()
    assert open_data(str(folder), root=root, image_size=20).shape == (1, 20, 20)


@pytest.mark.parametrize(
    ("sizes", "side"), [([(48, 48)], 48), ([(48, 40)], 32), ([(300, 300)], 224), ([(9, 9), (8, 8)], 32)]
)
def test_the_image_size_of_a_folder(sizes, side):
    assert datasets._common_side(datasets.Counter(sizes)) == side


def test_a_large_jpeg_is_read_at_a_fraction_of_its_size(root, tmp_path):
    folder = images_in(tmp_path / "set", {"a": [(16, 16)] * 2, "b": [(16, 16)] * 3})
    half("RGB", (50, 50, 50), (200, 200, 200)).resize((800, 800), Image.Resampling.NEAREST).save(folder / "a" / "x.jpg")
    got, _ = only(root, folder, image_size=16)
    assert abs(int(got[0, 5, 3]) - 50) < 4
    assert abs(int(got[0, 5, 12]) - 200) < 4


@pytest.mark.parametrize("content", [b"", b"not an image", "cut"])
def test_a_corrupt_image_is_named(root, tmp_path, content):
    folder = images_in(tmp_path / "set", {"a": SMALL, "b": SMALL})
    bad = folder / "a" / "bad.png"
    Image.fromarray(numbered(1, (64, 64))[0]).save(bad)
    bad.write_bytes(bad.read_bytes()[:2000] if content == "cut" else content)
    fails(r"cannot read the image .*a/bad\.png", str(folder), root=root)


def test_a_decompression_bomb_is_named(root, tmp_path, monkeypatch):
    folder = images_in(tmp_path / "set", {"a": SMALL, "b": SMALL})
    Image.new("L", (40, 40)).save(folder / "a" / "huge.png")
    for limit in (1000, 500):  # a warning from Pillow, then an error
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        fails(r"a/huge\.png has too many pixels", str(folder), root=root)


def test_postscript_under_a_false_name_is_not_run(root, tmp_path):
    folder = images_in(tmp_path / "set", {"a": SMALL, "b": SMALL})
    Image.new("L", (8, 8)).save(folder / "a" / "x.eps")
    (folder / "a" / "x.eps").rename(folder / "a" / "x.png")
    fails(r"cannot read the image .*a/x\.png", str(folder), root=root)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"": {}}, "has no class folders; expected <folder>/<class>/<images>"),
        ({"": {"a": SMALL}}, "has only one class, 'a'"),
        ({"": {"a": SMALL, "b": []}}, "the class folder .*/b has no images"),
        ({"train": {"a": SMALL, "b": SMALL}, "test": {"c": SMALL}}, "test has the class 'c', which train/ lacks"),
        ({"train": {"a": SMALL, "b": SMALL}, "val": {"z": SMALL}}, "val has the class 'z', which train/ lacks"),
        ({"train": {"a": SMALL, "b": SMALL}, "val": {}}, "val has no class folders"),
        ({"val": {"a": SMALL}, "test": {"a": SMALL}}, "no train/"),
        ({"": {"a": [(8, 8)], "b": [(8, 8)]}}, "too few to hold some out"),
    ],
)
def test_bad_folders(root, tmp_path, parts, match):
    for part, classes in parts.items():
        (tmp_path / "set" / part).mkdir(parents=True)
        images_in(tmp_path / "set" / part, classes)
    fails(match, str(tmp_path / "set"), root=root)


def test_a_class_folder_that_leads_elsewhere(root, tmp_path):
    folder = images_in(tmp_path / "set", {"a": SMALL, "b": SMALL})
    images_in(tmp_path / "other", {"c": SMALL})
    (folder / "c").symlink_to(tmp_path / "other" / "c")
    fails("set/c is a link to another place", str(folder), root=root)


def test_an_added_image_is_seen(root, tmp_path):
    folder = images_in(tmp_path / "set", {"a": SMALL, "b": SMALL})
    before = open_data(str(folder), root=root)
    images_in(folder, {"b": [*SMALL, (8, 8)]})
    after = open_data(str(folder), root=root)
    assert len(after.train) == len(before.train) + 1


# --- names -------------------------------------------------------------------------------------------------------


def test_unknown_names(root, tmp_path):
    fails("unknown data set 'cifr10': did you mean 'cifar10'\\? The path of", "cifr10", root=root)
    fails("unknown data set 'qqq': known are digits, cifar10, ", "qqq", root=root)
    fails("there is no folder or file .*nowhere", str(tmp_path / "nowhere"), root=root)
    fails(r"there is no folder or file nowhere\.npz", "nowhere.npz", root=root)
    (tmp_path / "x.zip").write_text("")
    fails("neither a folder of images nor an .npz", str(tmp_path / "x.zip"), root=root)


@pytest.mark.parametrize("name", datasets.TORCHVISION)
def test_every_torchvision_name_says_what_to_do_when_offline(root, monkeypatch, name):
    def offline(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    fails(f"{datasets.TORCHVISION[name].cls} is not complete under .*could not be downloaded", name, root=root)


# --- torchvision's sets ------------------------------------------------------------------------------------------


def idx(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("name", "folder", "prefixes"),
    [
        ("mnist", "MNIST", ("train", "t10k")),
        ("Fashion-MNIST", "FashionMNIST", ("train", "t10k")),
        ("emnist", "EMNIST", ("emnist-balanced-train", "emnist-balanced-test")),
    ],
)
def test_mnist_family(root, monkeypatch, name, folder, prefixes):
    monkeypatch.setattr(datasets, "CHUNK", 5000)
    classes = 47 if name == "emnist" else 10
    for prefix, count in zip(prefixes, (188, 94), strict=True):
        idx(root / folder / "raw" / f"{prefix}-images-idx3-ubyte", numbered(count, (28, 28)))
        idx(root / folder / "raw" / f"{prefix}-labels-idx1-ubyte", np.arange(count) % classes)
    data = open_data(name, root=root)
    assert (data.shape, len(data.classes), len(data.test)) == ((1, 28, 28), classes, 94)
    assert sorted(numbers(data.train) + numbers(data.val)) == list(range(188))
    assert numbers(data.test) == list(range(94))
    assert [number % classes for number in numbers(data.train)] == data.train.labels.tolist()


def test_a_damaged_idx_file(root):
    for prefix in ("train", "t10k"):
        idx(root / "MNIST" / "raw" / f"{prefix}-images-idx3-ubyte", numbered(30, (28, 28)))
        idx(root / "MNIST" / "raw" / f"{prefix}-labels-idx1-ubyte", np.arange(30) % 10)
    path = root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    fails("train-images-idx3-ubyte is damaged", "mnist", root=root)


def python2_batch(images, labels, key):
    """What cPickle of Python 2 writes for {key: labels, "data": images}."""
    numpy_array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R(K\x01"
    shape = b"J" + struct.pack("<i", len(images)) + b"M\0\x0c\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\0K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    pixels = b"\x89T" + struct.pack("<i", images.size) + images.tobytes() + b"tb"
    listed = b"".join(b"K" + bytes([label]) for label in labels)
    name = b"U" + bytes([len(key)]) + key.encode()
    return b"\x80\x02}(" + name + b"](" + listed + b"eU\x04data" + numpy_array + shape + dtype + pixels + b"u."


@pytest.mark.parametrize(
    ("name", "key", "meta"), [("CIFAR10", "labels", "label_names"), ("CIFAR100", "fine_labels", "fine_label_names")]
)
def test_cifar(root, monkeypatch, name, key, meta):
    monkeypatch.setattr(datasets, "CHUNK", 30_000)
    known = getattr(torchvision.datasets, name)
    folder = root / known.base_folder
    folder.mkdir(parents=True)

    def put(filename, content):
        (folder / filename).write_bytes(content)
        return [filename, hashlib.md5(content).hexdigest()]

    images = numbered(60, (3, 32, 32))
    labels = np.arange(60) % 4
    batches = [python2_batch(images[at : at + 20], labels[at : at + 20], key) for at in (0, 20, 40)]
    whole = pickle.loads(batches[0], encoding="latin1")
    np.testing.assert_array_equal(whole["data"].reshape(-1, 3, 32, 32), images[:20])
    monkeypatch.setattr(known, "train_list", [put("one", batches[0]), put("two", batches[1])])
    monkeypatch.setattr(known, "test_list", [put("three", batches[2])])
    filename, md5 = put("names", pickle.dumps({meta: ["w", "x", "y", "z"]}, protocol=2))
    monkeypatch.setattr(known, "meta", {"filename": filename, "key": meta, "md5": md5})

    data = open_data(name, root=root)
    assert (data.classes, data.shape, data.augment) == (["w", "x", "y", "z"], (3, 32, 32), "flip+crop")
    np.testing.assert_array_equal(everything(data.test).numpy(), images[40:])
    assert data.test.labels.tolist() == labels[40:].tolist()
    assert sorted(numbers(data.train) + numbers(data.val)) == list(range(40))

    (folder / "two").write_bytes(batches[0])
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("md5 was not compared"))
    with pytest.raises(pytest.fail.Exception, match="md5"):
        open_data(name, root=root, image_size=16)


def test_reading_a_cifar_pickle_runs_nothing(tmp_path):
    command = b"cos\nsystem\n(U" + bytes([len(str(tmp_path)) + 8]) + b"touch " + str(tmp_path).encode() + b"/x" + b"tR0"
    batch = python2_batch(numbered(20, (3, 32, 32)), np.arange(20) % 4, "labels")
    (tmp_path / "batch").write_bytes(batch[:2] + command + batch[2:])
    assert sum(len(labels) for _, labels in datasets._cifar_batch(tmp_path / "batch")) == 20
    assert not (tmp_path / "x").exists()


def test_stl10(root, monkeypatch):
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    images = numbered(20, (3, 96, 96))
    for part in ("train", "test"):
        (folder / f"{part}_X.bin").write_bytes(images.transpose(0, 1, 3, 2).tobytes())
        (folder / f"{part}_y.bin").write_bytes((np.arange(20) % 2 + 1).astype(np.uint8).tobytes())
    (folder / "class_names.txt").write_text("airplane\nbird\n")
    monkeypatch.setattr(torchvision.datasets.STL10, "_check_integrity", lambda _: True)
    data = open_data("stl10", root=root)
    assert (data.classes, len(data.train), len(data.val)) == (["airplane", "bird"], 18, 2)
    np.testing.assert_array_equal(everything(data.test).numpy(), images)


def svhn(root, monkeypatch):
    from scipy.io import savemat

    root.mkdir()
    images = numbered(40, (3, 32, 32))
    files = {}
    for part in ("train", "test"):
        path = root / f"{part}.mat"
        savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": (np.arange(40) % 10 + 1)[:, None]})
        files[part] = ["http://nowhere", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", files)
    return images


def test_svhn(root, monkeypatch):
    images = svhn(root, monkeypatch)
    data = open_data("svhn", root=root, budget=10**6)
    np.testing.assert_array_equal(everything(data.test).numpy(), images)
    assert data.test.labels[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_svhn_says_what_converting_needs_and_can_be_reused_below_it(root, monkeypatch):
    svhn(root, monkeypatch)
    fails(r"about 1 MB of memory once, .*--budget 1MB or more", "svhn", root=root, budget=10**5)
    open_data("svhn", root=root, budget=10**6)
    open_data("svhn", root=root, budget=10**5)


def test_a_set_of_image_files(root):
    images_in(root / "eurosat" / "2750", {"Forest": SMALL, "River": SMALL})
    data = open_data("eurosat", root=root, image_size=8)
    assert (data.classes, data.shape, data.augment) == (["Forest", "River"], (3, 8, 8), "flip+crop")
    assert [len(split) for split in (data.train, data.val, data.test)] == [16, 2, 2]


def test_a_damaged_file_in_a_torchvision_set(root):
    folder = images_in(root / "eurosat" / "2750", {"Forest": SMALL, "River": SMALL})
    (folder / "River" / "3.png").write_bytes(b"x")
    fails(r"cannot read image 13 of EuroSAT .*3\.png", "eurosat", root=root)


# --- torch data sets ---------------------------------------------------------------------------------------------


class Listed(torch.utils.data.Dataset):
    """Images whose value is their index; labels in an attribute, or only in the items."""

    def __init__(self, labels, attribute=None, dtype=torch.float32, **extra):
        self.given = list(labels)
        self.dtype = dtype
        self.reads = 0
        if attribute:
            setattr(self, attribute, self.given)
        vars(self).update(extra)

    def __len__(self):
        return len(self.given)

    def __getitem__(self, index):
        self.reads += 1
        return torch.full((3, 4, 5), index, dtype=self.dtype), self.given[index]


@pytest.mark.parametrize("attribute", ["targets", "labels", None])
def test_from_torch_finds_the_labels(attribute):
    dataset = Listed([i % 3 for i in range(90)], attribute)
    data = from_torch(dataset, test=Listed([0, 1, 2], attribute))
    assert (data.shape, data.classes, data.mean, data.std) == ((3, 4, 5), ["0", "1", "2"], [0.0] * 3, [1.0] * 3)
    assert data.raw
    assert (data.augment, len(data.train), len(data.val), len(data.test)) == ("none", 81, 9, 3)
    values = everything(data.val)[:, 0, 0, 0]
    assert values.dtype == torch.float32
    assert (values.long() % 3).tolist() == data.val.labels.tolist()
    assert not set(values.tolist()) & set(everything(data.train)[:, 0, 0, 0].tolist())


def test_from_torch_does_not_decode_everything_for_listed_labels():
    dataset = Listed([i % 3 for i in range(90)], "targets")
    from_torch(dataset)
    assert dataset.reads <= 1


def test_from_torch_reads_items_afresh():
    data = from_torch(Listed([0, 1] * 20), Listed([0, 1]))
    dataset = data.train._images
    before = dataset.reads
    data.train.read(np.array([3, 3]))
    assert dataset.reads == before + 2


def test_from_torch_tensors_and_subsets():
    images = torch.arange(40).float()[:, None, None, None].expand(40, 1, 2, 2)
    whole = TensorDataset(images, torch.arange(40) % 2)
    data = from_torch(Subset(Subset(whole, range(10, 40)), [5, 0, 7, 2]), Subset(whole, [3]), classes=["even", "odd"])
    assert data.train.labels.tolist() == [1, 0, 1, 0]
    assert everything(data.train)[:, 0, 0, 0].tolist() == [15, 10, 17, 12]
    assert (data.classes, data.test) == (["even", "odd"], None)


def test_from_torch_heeds_a_target_transform():
    dataset = Listed([0, 1] * 20)
    dataset.targets = [7] * 40  # what is listed before the transform
    dataset.target_transform = lambda label: label
    assert from_torch(dataset, Listed([0, 1])).train.labels.tolist() == [0, 1] * 20


def test_from_torch_uint8_images_have_a_mean():
    data = from_torch(Listed([0, 1] * 20, dtype=torch.uint8), Listed([0], dtype=torch.uint8), classes=None)
    assert everything(data.train).dtype == torch.uint8
    assert not data.raw
    np.testing.assert_allclose(data.mean, [19.5] * 3)
    np.testing.assert_allclose(data.std, [np.arange(40).std()] * 3)


def test_from_torch_takes_the_class_names_of_the_data_set():
    assert from_torch(Listed([0, 1] * 20, classes=["x", "y"])).classes == ["x", "y"]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Items(torch.utils.data.Dataset):
    def __init__(self, *items):
        self.items = items * 20

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


CHW = torch.zeros(3, 4, 4)


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        (Endless(), "no length; give a map-style one"),
        (Listed([]), "is empty"),
        (Listed([1, 2] * 20), "labels of the training data set are 1, 2"),
        (Listed([0.0, 1.0] * 20), "one integer per image"),
        (Listed([True, False] * 20), "one integer per image"),
        (Items((CHW, [0, 1]), (CHW, [1, 0])), "one integer per image"),
        (Items((Image.new("L", (4, 4)), 0), (Image.new("L", (4, 4)), 1)), "gives Image; .*ToTensor"),
        (Items((torch.zeros(4, 4), 0), (torch.zeros(4, 4), 1)), r"gives Tensor \(4, 4\)"),
        (Items((CHW.long(), 0), (CHW.long(), 1)), "int64; images must be uint8 or float"),
    ],
)
def test_from_torch_bad_data_sets(dataset, match):
    with pytest.raises(NeuroFluxError, match=match):
        from_torch(dataset)


def test_from_torch_other_mistakes():
    good = Listed([0, 1] * 20)
    with pytest.raises(NeuroFluxError, match="the val data set has the labels 2"):
        from_torch(good, Listed([0, 2]))
    with pytest.raises(NeuroFluxError, match="3 class names for 2 classes"):
        from_torch(good, classes=["a", "b", "c"])
    data = from_torch(Items((CHW, 0), (torch.zeros(3, 5, 5), 1)))
    with pytest.raises(NeuroFluxError, match=r"is \(3, 5, 5\) torch.float32, others are \(3, 4, 4\)"):
        everything(data.train)


# --- augment -----------------------------------------------------------------------------------------------------


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_augment_none_changes_nothing():
    images = torch.from_numpy(numbered(5, (3, 16, 16)))
    assert augment(images, "none", generator()) is images


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flip_mirrors_about_half_of_the_images(dtype):
    images = torch.from_numpy(numbered(200, (3, 8, 6))).to(dtype)
    flipped = augment(images, "flip", generator())
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, images, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert [not s for s in same] == mirrored
    assert 70 < sum(mirrored) < 130


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_shifts_each_image_by_up_to_an_eighth(dtype):
    images = torch.from_numpy(numbered(300, (2, 16, 8)) // 2 + 1).to(dtype)
    cropped = augment(images, "crop", generator())
    assert (cropped.shape, cropped.dtype) == (images.shape, images.dtype)
    shifts = set()
    for image, crop in zip(images, cropped, strict=True):
        padded = torch.nn.functional.pad(image, (1, 1, 2, 2))
        found = [(y, x) for y in range(5) for x in range(3) if torch.equal(padded[:, y : y + 16, x : x + 8], crop)]
        assert len(found) == 1
        shifts.add(found[0])
    assert len(shifts) == 15


def test_augment_is_deterministic_and_keeps_its_input():
    images = torch.from_numpy(numbered(50, (3, 16, 16)))
    before = images.clone()
    first, again, other = (augment(images, "flip+crop", generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(images, before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
