"""Data sets in memory or in files, and each rank's share of them."""

from .dataset import Dataset
from .datasets import NAMES, load
from .download import cache_folder
from .errors import DataError, NotAvailableError
from .feeds import Batch, Feed, ShardFeed
from .files import Files, files
from .files_feed import FilesFeed
from .own import DatasetLike, as_dataset, from_tensors
from .queues import QueueFeed, WorkQueue
from .shards import Part, Shard, share
from .tensors import Tensors

__all__ = [
    "NAMES",
    "Batch",
    "DataError",
    "Dataset",
    "DatasetLike",
    "Feed",
    "Files",
    "FilesFeed",
    "NotAvailableError",
    "Part",
    "QueueFeed",
    "Shard",
    "ShardFeed",
    "Tensors",
    "WorkQueue",
    "as_dataset",
    "cache_folder",
    "files",
    "from_tensors",
    "load",
    "share",
]
