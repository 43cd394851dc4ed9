"""One's own data goes in as it is: torch's data sets, tensors, arrays; what is missing is said, not guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import FakeData
from torchvision.transforms import RandomHorizontalFlip

from labkit import data
from labkit.data import DataError, as_dataset

from .sample_files import write_files

IMAGES = torch.randint(0, 256, (12, 1, 5, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3


class Own(Dataset[Any]):
    """A data set of the kind that torch's tutorials write."""

    classes = ("a", "b", "c")

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(IMAGES[0], 0)])


def own(images: Any = IMAGES, labels: Any = LABELS) -> Own:
    return Own(list(zip(images, labels, strict=True)))


def test_labkits_own_are_returned_as_they_are(tmp_path: Path) -> None:
    dataset = data.from_tensors(IMAGES, LABELS)
    assert as_dataset(dataset) is dataset
    files = data.files(write_files(tmp_path, "npz", [4]))
    assert as_dataset(files) is files


@pytest.mark.parametrize(
    "half",
    [
        lambda part: (IMAGES[part], LABELS[part]),
        lambda part: (IMAGES[part].numpy(), LABELS[part].numpy()),
        lambda part: (IMAGES[part].squeeze(1), LABELS[part]),
        lambda part: TensorDataset(IMAGES[part], LABELS[part]),
        lambda part: own(IMAGES[part], LABELS[part]),
        lambda part: own(IMAGES[part], LABELS[part].tolist()),
        lambda part: own(IMAGES[part].squeeze(1).numpy(), LABELS[part].numpy()),
        lambda part: own([Image.fromarray(image.numpy()) for image in IMAGES[part].squeeze(1)], LABELS[part]),
        lambda part: Subset(own(), list(range(12))[part]),
    ],
)
def test_a_training_and_a_test_set_of_any_kind_are_taken_unchanged(half: Any) -> None:
    dataset = as_dataset((half(slice(0, 8)), half(slice(8, 12))), name="mine")
    assert isinstance(dataset, data.Dataset) and dataset.summary.startswith("mine: 8 training and 4 test images, 1×5×5")
    assert torch.equal(dataset.train.images, IMAGES[:8]) and torch.equal(dataset.train.labels, LABELS[:8])
    assert torch.equal(dataset.test.images, IMAGES[8:]) and torch.equal(dataset.test.labels, LABELS[8:])
    assert len(dataset.classes) == 3


def test_torchvisions_sets_come_with_their_colours_and_class_names() -> None:
    fake = FakeData(size=6, image_size=(3, 4, 7), num_classes=3)
    dataset = as_dataset((fake, fake), classes=["x", "y", "z"])
    assert isinstance(dataset, data.Dataset) and dataset.train.images.shape == (6, 3, 4, 7)
    assert torch.equal(dataset.train.images[2], torch.from_numpy(np.array(fake[2][0])).permute(2, 0, 1))
    assert dataset.classes == ("x", "y", "z") and as_dataset((own(), own())).classes == ("a", "b", "c")


def test_floating_point_samples_are_not_touched() -> None:
    values = torch.randn(8, 3)
    dataset = as_dataset((own(values, LABELS[:8]), (values, LABELS[:8])))
    batch = next(dataset.feed(0, 1, 8).epoch(0))
    assert sorted(batch.images.tolist()) == sorted(values.tolist())


def test_arrays_with_channels_in_either_place_are_taken() -> None:
    colour = np.arange(3 * 4 * 7, dtype=np.uint8).reshape(3, 4, 7)
    for images in ([colour] * 2, [colour.transpose(1, 2, 0)] * 2):
        dataset = as_dataset((own(images, [0, 1]), own(images, [0, 1])))
        assert isinstance(dataset, data.Dataset) and np.array_equal(dataset.train.images[0].numpy(), colour)


def test_a_test_set_is_held_back_only_when_asked_for() -> None:
    for single in ((IMAGES, LABELS), own(), TensorDataset(IMAGES, LABELS)):
        with pytest.raises(DataError, match=r"a test set is needed, too: give \(train, test\); or test_fraction=0.1"):
            as_dataset(single)
        dataset = as_dataset(single, test_fraction=0.25, seed=3)
        assert isinstance(dataset, data.Dataset) and (len(dataset.train), len(dataset.test)) == (9, 3)
    assert as_dataset(own(), test_fraction=0.0).samples == 12
    with pytest.raises(DataError, match="test_fraction is for data without a test set"):
        as_dataset((own(), own()), test_fraction=0.1)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        ("mnist", "the data set is a str; it must be a data set of torch's with an index, or"),
        (None, "the data set is a NoneType"),
        (IMAGES, "the data set is a Tensor"),
        ((own(), 3), "test is an int; it must be"),
        ((own(), own(), own()), "the data set is a tuple"),
        (DataLoader(own()), "the data set is a DataLoader"),
        (Stream(), "the data set, a Stream, has no samples, or does not say how many"),
        (own([], []), "an Own, has no samples"),
        (Own([IMAGES[0]]), "sample 0 is a Tensor; it must be"),
        (own([IMAGES[0], IMAGES[0][:, 1:]], [0, 1]), "sample 1 is uint8 1×4×5, sample 0 is uint8 1×5×5"),
        (own(IMAGES, [0.5] * 12), "the label of sample 0 is 0.5; it must be the number of a class"),
        (own(IMAGES, [torch.ones(3)] * 12), "the label of sample 0 is tensor"),
        (own([Image.new("P", (4, 4))], [0]), "image of sample 0 is of PIL's mode 'P'; .*convert"),
        (own(["x"], [0]), "the image of sample 0 is a str"),
        (own(IMAGES, [7] * 12), "training labels go up to 7, but there are 3 classes"),
    ],
)
def test_what_cannot_be_taken_is_said_with_what_can(thing: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        as_dataset(thing, test_fraction=None if isinstance(thing, tuple) else 0.1)


def test_images_that_are_never_twice_the_same_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Flipped(Own):
        def __getitem__(self, index: int) -> Any:
            image, label = self.items[index]
            return RandomHorizontalFlip()(image), label

    torch.manual_seed(0)
    as_dataset((Flipped(own().items), own()))
    assert "train gives another image each time" in caplog.text
