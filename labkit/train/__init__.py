"""Training over several ranks."""

from .averaging import averaging
from .backup_workers import backup_workers
from .batch_size import BatchSize, find_batch_size
from .checkpoint import CheckpointError, load_checkpoint
from .comparison import Comparison, Summary
from .ddp import DDPGradients
from .device import choose_device
from .downpour import downpour
from .easgd import easgd
from .elastic import elastic
from .elastic_state import ElasticState
from .flat import FlatGradients
from .flat_weights import FlatWeights
from .gem import gem
from .history import EpochRow, History, Steps
from .loop import Run
from .matrices import matrices
from .methods import METHODS, method, run
from .models import CNN, DNN, MODELS, GRUClassifier, LeNet, count_parameters
from .optimizers import SGD, Adam
from .overlap import OverlappedGradients
from .pipeline import pipeline
from .progress import Progress
from .replicas import TrainError, replica_differences
from .settings import SettingError, Settings
from .single import single
from .slow import Load, Pause
from .synchronous import sync_gradients, sync_initial_weights, synchronous
from .tensor_parallel import split_layers, tensor_parallel, whole_state_dict
from .transport import Alone, MPITransport, TorchTransport, Transport
from .updates import FlatParameters, Updater
from .validation import validate_shared
from .validator import Validator

__all__ = [
    "CNN",
    "DNN",
    "METHODS",
    "MODELS",
    "SGD",
    "Adam",
    "Alone",
    "BatchSize",
    "CheckpointError",
    "Comparison",
    "DDPGradients",
    "ElasticState",
    "EpochRow",
    "FlatGradients",
    "FlatParameters",
    "FlatWeights",
    "GRUClassifier",
    "History",
    "LeNet",
    "Load",
    "MPITransport",
    "OverlappedGradients",
    "Pause",
    "Progress",
    "Run",
    "SettingError",
    "Settings",
    "Steps",
    "Summary",
    "TorchTransport",
    "TrainError",
    "Transport",
    "Updater",
    "Validator",
    "averaging",
    "backup_workers",
    "choose_device",
    "count_parameters",
    "downpour",
    "easgd",
    "elastic",
    "find_batch_size",
    "gem",
    "load_checkpoint",
    "matrices",
    "method",
    "pipeline",
    "replica_differences",
    "run",
    "single",
    "split_layers",
    "sync_gradients",
    "sync_initial_weights",
    "synchronous",
    "tensor_parallel",
    "validate_shared",
    "whole_state_dict",
]
