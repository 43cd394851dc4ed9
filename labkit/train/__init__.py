"""Training over several ranks."""

from .averaging import averaging
from .backup_workers import backup_workers
from .checkpoint import CheckpointError, load_checkpoint
from .comparison import Comparison, Summary
from .ddp import DDPGradients
from .device import choose_device
from .downpour import downpour
from .easgd import easgd
from .flat import FlatGradients
from .flat_weights import FlatWeights
from .gem import gem
from .history import EpochRow, History, Steps
from .loop import Run
from .methods import METHODS, method, run
from .models import CNN, DNN, MODELS, GRUClassifier, LeNet, count_parameters
from .optimizers import SGD, Adam
from .overlap import OverlappedGradients
from .progress import Progress
from .replicas import TrainError, replica_differences
from .settings import SettingError, Settings
from .single import single
from .slow import Load, Pause
from .synchronous import sync_gradients, sync_initial_weights, synchronous
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
    "CheckpointError",
    "Comparison",
    "DDPGradients",
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
    "gem",
    "load_checkpoint",
    "method",
    "replica_differences",
    "run",
    "single",
    "sync_gradients",
    "sync_initial_weights",
    "synchronous",
    "validate_shared",
]
