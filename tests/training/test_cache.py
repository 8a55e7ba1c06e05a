"""Levels: reading ahead, writing and reading features."""

import threading

import numpy as np
import pytest
import torch

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.arrays import DamagedArray
from neuroflux.training.cache import Batches, CachedLevel, ForwardLevel, check_disk, write_level
from neuroflux.training.storage import Storage

KEPT, ONE = Storage("fp16", (2, 3, 4)), Storage("fp16", (1, 1, 1))


class Numbers:
    """A level whose row k is the number k."""

    def __init__(self, count):
        self.labels = np.arange(count) % 3
        self.views, self.view = 1, 0
        self.threads = set()

    def read(self, indices):
        self.threads.add(threading.current_thread().name)
        return torch.from_numpy(indices).float().view(-1, 1, 1, 1)

    def features(self, rows, generator):
        return rows if generator is None else rows + 100 * torch.rand(len(rows), 1, 1, 1, generator=generator)


class TestBatches:
    def test_every_row_once_and_in_order(self):
        order = np.random.default_rng(0).permutation(23)
        seen = [(rows.flatten().tolist(), list(indices)) for rows, indices in Batches(Numbers(23), order, lambda _: 5)]
        assert [len(indices) for _, indices in seen] == [5, 5, 5, 5, 3]
        assert [k for _, indices in seen for k in indices] == list(order)
        assert all(rows == list(indices) for rows, indices in seen)

    def test_a_last_batch_below_the_smallest_is_left_out(self):
        assert [len(i) for _, i in Batches(Numbers(11), np.arange(11), lambda _: 5, smallest=2)] == [5, 5]
        assert list(Batches(Numbers(1), np.arange(1), lambda _: 5, smallest=2)) == []

    def test_the_size_is_asked_for_every_batch(self):
        sizes = iter([2, 4, 8, 16])
        assert [len(i) for _, i in Batches(Numbers(14), np.arange(14), lambda _: next(sizes))] == [2, 4, 8]

    def test_reading_runs_in_another_thread_which_ends(self):
        level = Numbers(10)
        batches = iter(Batches(level, np.arange(10), lambda _: 3))
        next(batches)
        batches.close()
        assert level.threads == {"read-ahead"}
        assert not any(thread.name == "read-ahead" for thread in threading.enumerate())

    def test_an_error_while_reading_arrives_where_the_batch_is_used(self):
        level = Numbers(10)
        level.read = lambda indices: (_ for _ in ()).throw(NeuroFluxError("broken image 7"))
        with pytest.raises(NeuroFluxError, match="broken image 7"):
            list(Batches(level, np.arange(10), lambda _: 3))


class TestCachedLevel:
    def write(self, path, count=10, factor=1.0):
        write_level(path, Numbers(count), lambda rows: rows.expand(-1, 2, 3, 4) * factor, 4, Storage("fp16", (2, 3, 4)))
        return path

    def test_round_trip(self, tmp_path):
        level = CachedLevel(self.write(tmp_path / "train.npy"), np.zeros(10), KEPT, False, torch.device("cpu"))
        features = level.features(level.read(np.array([7, 2])), None)
        assert features.dtype == torch.float32
        assert features.shape == (2, 2, 3, 4)
        assert features[:, 0, 0, 0].tolist() == [7.0, 2.0]

    def test_values_beyond_fp16_are_clamped_not_infinite(self, tmp_path):
        path = self.write(tmp_path / "train.npy", factor=1e6)
        level = CachedLevel(path, np.zeros(10), KEPT, False, torch.device("cpu"))
        assert torch.isfinite(level.features(level.read(np.arange(10)), None)).all()

    def test_features_are_mirrored_in_training_only(self, tmp_path):
        path = tmp_path / "train.npy"
        write_level(
            path, Numbers(40), lambda rows: torch.arange(4.0).expand(len(rows), 1, 1, 4), 8, Storage("fp16", (1, 1, 4))
        )
        level = CachedLevel(path, np.zeros(40), Storage("fp16", (1, 1, 4)), True, torch.device("cpu"))
        rows = level.read(np.arange(40))
        assert (level.features(rows, None) == torch.arange(4.0)).all()
        first = level.features(rows, torch.Generator().manual_seed(0))[:, 0, 0, 0]
        assert set(first.tolist()) == {0.0, 3.0}

    def test_each_view_is_drawn_anew_and_the_next_level_follows_it(self, tmp_path):
        def read(level, view):
            level.view = view
            return level.features(level.read(np.arange(10)), None).flatten().tolist()

        draw = torch.Generator().manual_seed(0)
        write_level(tmp_path / "1.npy", Numbers(10), lambda rows: rows, 4, Storage("fp16", (1, 1, 1)), 3, draw)
        first = CachedLevel(tmp_path / "1.npy", np.zeros(10), ONE, True, torch.device("cpu"))
        assert first.views == 3
        views = [read(first, view) for view in range(3)]
        assert len({tuple(view) for view in views}) == 3
        write_level(tmp_path / "2.npy", first, lambda rows: rows * 2, 4, Storage("fp16", (1, 1, 1)), 3, draw)
        second = CachedLevel(tmp_path / "2.npy", np.zeros(10), ONE, True, torch.device("cpu"))
        for view in range(3):
            assert read(second, view) == pytest.approx([2 * value for value in views[view]], rel=1e-2)

    def test_one_view_is_the_image_unchanged(self, tmp_path):
        write_level(
            tmp_path / "1.npy", Numbers(10), lambda rows: rows, 4, Storage("fp16", (1, 1, 1)), 1, torch.Generator()
        )
        level = CachedLevel(tmp_path / "1.npy", np.zeros(10), ONE, False, torch.device("cpu"))
        assert level.read(np.arange(10)).flatten().tolist() == list(range(10))

    @pytest.mark.parametrize(("kind", "worst"), [("fp32", 0.0), ("fp16", 0.001), ("bf16", 0.01), ("int8", 0.01)])
    def test_features_come_back_in_every_kind(self, tmp_path, kind, worst):
        features = torch.randn(12, 3, 4, 5, generator=torch.Generator().manual_seed(0)).relu()
        storage = Storage(kind, (3, 4, 5))
        level = Numbers(12)
        write_level(tmp_path / "a.npy", level, lambda rows: features[rows.flatten().long()], 5, storage)
        again = CachedLevel(tmp_path / "a.npy", level.labels, storage, False, torch.device("cpu"))
        got = again.features(again.read(np.array([11, 0, 3])), None)
        assert got.shape == (3, 3, 4, 5)
        assert got.dtype == torch.float32
        assert float((got - features[[11, 0, 3]]).abs().max()) <= worst * float(features.max())
        size = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}[kind]
        assert again.array.nbytes == 12 * (60 * size + (8 if kind == "int8" else 0))

    def test_features_of_another_kind_are_refused(self, tmp_path):
        path = self.write(tmp_path / "train.npy")
        for other in (Storage("fp32", (2, 3, 4)), Storage("bf16", (2, 3, 4)), Storage("fp16", (2, 4, 3))):
            with pytest.raises(DamagedArray, match="another kind"):
                CachedLevel(path, np.zeros(10), other, False, torch.device("cpu"))

    def test_another_number_of_labels_is_refused(self, tmp_path):
        with pytest.raises(NeuroFluxError, match="10 images instead of 9"):
            CachedLevel(self.write(tmp_path / "train.npy"), np.zeros(9), KEPT, False, torch.device("cpu"))


class TestForwardLevel:
    def test_features_are_what_the_finished_layers_make_of_the_images_whatever_the_pieces(self):
        seen = []

        def forward(features):
            seen.append(len(features))
            return features.expand(-1, 2, 1, 1) * 3

        level = ForwardLevel(Numbers(10), forward, 4)
        features = level.features(level.read(np.array([9, 1, 2, 3, 4, 5, 6])), None)
        assert features[:, 1, 0, 0].tolist() == [27, 3, 6, 9, 12, 15, 18]
        assert seen == [4, 3]
        assert level.features(level.read(np.array([5])), None).flatten().tolist() == [15, 15]

    def test_every_reading_changes_the_images_anew(self):
        level, draw = ForwardLevel(Numbers(10), lambda rows: rows, 4), torch.Generator().manual_seed(0)
        first, second = (level.features(level.read(np.arange(10)), draw) for _ in range(2))
        assert not torch.equal(first, second)


def test_a_disk_that_is_too_small_is_noticed_before(tmp_path):
    check_disk(tmp_path, 1000)
    with pytest.raises(NeuroFluxError, match="free space"):
        check_disk(tmp_path, 10**18)
