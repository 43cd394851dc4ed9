"""Images in memory: normalised by their own figures, and nothing taken that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from labkit.data import DataError, Dataset, Tensors, from_tensors


def noise(n: int = 40, channels: int = 3, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8, generator=generator)
    images[:, 0] //= 4  # channels with figures of their own
    return images


def labels(n: int = 40, classes: int = 4) -> torch.Tensor:
    return torch.arange(n) % classes


def test_a_batch_of_everything_has_mean_0_and_deviation_1_in_each_channel() -> None:
    images, _ = Tensors(noise(), labels()).batch(slice(None))
    assert images.dtype == torch.float32
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(images.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_a_batch_holds_the_samples_asked_for_and_leaves_memory_as_it_was() -> None:
    samples = Tensors(noise(), labels())
    before = samples.images.clone()
    chosen = torch.tensor([7, 3, 7])
    images, answers = samples.batch(chosen)
    whole, _ = samples.batch(slice(0, 40))
    assert torch.equal(images, whole[chosen]) and answers.tolist() == [3, 3, 3]
    assert torch.equal(samples.images, before)


def test_an_empty_batch_is_a_batch() -> None:
    images, answers = Tensors(noise(), labels()).batch(torch.tensor([], dtype=torch.int64))
    assert images.shape == (0, 3, 6, 6) and len(answers) == 0


def test_flat_grey_images_stay_finite() -> None:
    images, _ = Tensors(torch.full((4, 1, 2, 2), 9, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)).batch([0])
    assert torch.equal(images, torch.zeros(1, 1, 2, 2))


def test_floating_point_samples_are_taken_as_they_are() -> None:
    samples = torch.randn(5, 7, dtype=torch.float64)
    images, _ = Tensors(samples, torch.zeros(5, dtype=torch.int64)).batch([1, 2])
    assert torch.equal(images, samples[1:3])


def test_a_test_set_is_normalised_by_its_training_set() -> None:
    dataset = from_tensors(noise(), labels(), noise() // 2, labels())
    assert dataset.test.mean == dataset.train.mean and dataset.test.std == dataset.train.std


def test_moving_to_the_same_device_copies_nothing() -> None:
    samples = Tensors(noise(), labels())
    assert samples.to("cpu") is samples


def test_own_arrays_are_split_without_loss() -> None:
    images = np.arange(50, dtype=np.uint8).reshape(50, 1, 1).repeat(4, 1).repeat(4, 2)
    dataset = from_tensors(images, np.arange(50, dtype=np.int32) % 5, name="ramps")
    assert (len(dataset.train), len(dataset.test)) == (45, 5)
    kept = torch.cat((dataset.train.images[:, 0, 0, 0], dataset.test.images[:, 0, 0, 0]))
    assert sorted(kept.tolist()) == list(range(50))
    assert (dataset.channels, dataset.image_size, len(dataset.classes)) == (1, 4, 5)
    assert repr(dataset) == "ramps: 45 training and 5 test images, 1×4×4, 5 classes; from tensors"


def test_a_read_only_array_is_taken_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    images = np.zeros((10, 4, 4), dtype=np.uint8)
    images.flags.writeable = False
    from_tensors(images, np.zeros(10, dtype=np.int64))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("images", "answers", "words"),
    [
        (noise().to(torch.int64), labels(), "images are int64; they must be uint8"),
        (noise()[0], labels(), "40 labels|N×C×H×W|3 images"),
        (torch.zeros(40, dtype=torch.uint8), labels(), "images are 40; uint8 images must be N×C×H×W"),
        (torch.zeros(40), labels(), "floating-point samples must be N×…"),
        (noise(), labels(39), "40 images and 39 labels"),
        (noise(), labels() - 1, "smallest label is -1"),
        (noise(), labels().float(), "labels are float32"),
        (noise(), labels().bool(), "labels are bool"),
        (noise(), labels().reshape(4, 10), "labels are int64 4×10"),
        ([[1, 2]], labels(), "must be a torch tensor or a numpy array, not list"),
        (np.array(["a"]), labels(), "which torch does not know"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(images: Any, answers: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_tensors(images, answers)


def test_tensors_themselves_refuse_too() -> None:
    with pytest.raises(DataError, match="uint8 images must be N×C×H×W"):
        Tensors(torch.zeros(4, 5, 5, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(DataError, match="labels are int32 4; they must be int64"):
        Tensors(torch.zeros(4, 1, 5, 5, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32))


def test_training_and_test_images_must_have_one_shape_and_known_classes() -> None:
    with pytest.raises(DataError, match="training images are 3×6×6, test images 3×5×5"):
        Dataset("x", Tensors(noise(), labels()), Tensors(noise(size=5), labels()), ("a",) * 4, "")
    with pytest.raises(DataError, match="test labels go up to 3, but there are 2 classes"):
        Dataset("x", Tensors(noise(), labels(classes=2)), Tensors(noise(), labels()), ("a", "b"), "")
    with pytest.raises(DataError, match="give both"):
        from_tensors(noise(), labels(), noise())
    with pytest.raises(DataError, match="test_fraction must be"):
        from_tensors(noise(), labels(), test_fraction=1.5)
