"""The command line: what it refuses, in one line and with status 2, and what it starts."""

from __future__ import annotations

import os

import pytest

from labkit import data
from labkit.train import METHODS, program
from labkit.train.options import DATASETS, METHOD_NAMES, parse
from labkit.train.worker import times


@pytest.fixture(autouse=True)
def outside_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", program.RELAUNCHED):
        monkeypatch.delenv(name, raising=False)


def test_the_defaults_are_the_documents() -> None:
    args = parse([])
    assert (args.backend, args.batch_size, args.epochs, args.learning_rate) == ("mpi", 128, 1, 0.001)
    assert (args.init_method, args.no_cuda) == ("tcp://127.0.0.1:23456", False)


def test_it_knows_every_method_and_reads_their_settings() -> None:
    assert set(METHOD_NAMES) == set(METHODS)
    given = parse(["--set", "sync_every=4", "--set", "name=x y", "--set", "a=(1, 2.5)"]).set
    assert given == [("sync_every", 4), ("name", "x y"), ("a", (1, 2.5))]


def test_a_method_with_an_optimizer_of_its_own_keeps_it_unless_told_otherwise() -> None:
    args = parse(["--method", "gem"])
    assert (args.learning_rate, args.momentum, args.optimizer, args.batch_size) == (None, None, None, 128)
    args = parse(["--method", "easgd", "--learning-rate", "0.3", "--optimizer", "adam"])
    assert (args.learning_rate, args.optimizer) == (0.3, "adam")
    assert parse(["--method", "matrices"]).model == "dnn"


def test_it_reads_where_the_data_lies_and_what_happens_around_the_steps() -> None:
    args = parse(["--train-files", "a.npz", "b/*.npz", "--test-files", "c.h5", "--queue", "--batch-size", "auto"])
    assert (args.train_files, args.test_files, args.queue) == (["a.npz", "b/*.npz"], ["c.h5"], True)
    assert args.batch_size == "auto"
    args = parse(["--checkpoint", "here", "--checkpoint-every", "30s", "--restore", "--target", "val_acc,>,0.9"])
    assert (args.checkpoint, args.checkpoint_every, args.restore) == ("here", "30s", True)
    assert (args.target, args.early_stopping, args.validate, args.monitor) == ("val_acc,>,0.9", None, None, False)
    args = parse(["--restore", "there", "--checkpoint-every", "3", "--monitor", "--validate", "thread"])
    assert (args.restore, args.checkpoint_every, args.monitor, args.validate) == ("there", 3, True, "thread")


def test_it_knows_the_data_sets_that_load_knows() -> None:
    assert set(DATASETS) == set(data.NAMES)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch-size", "0"], "--batch-size: '0' is not a whole number of at least 1"),
        (["--epochs", "many"], "--epochs: 'many' is not a whole number"),
        (["--learning-rate", "nan"], "--learning-rate: 'nan' is not a number above 0"),
        (["--momentum", "1"], "--momentum: '1' is not a number from 0 up to"),
        (["--world-size", "0"], "--world-size: '0' is not a whole number of at least 1"),
        (["--world-size", "-3"], "--world-size: '-3' is not a whole number of at least 1"),
        (["--backend", "tcp"], "--backend: invalid choice: 'tcp'"),
        (["--dataset", "mnits"], "--dataset: invalid choice: 'mnits'"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--batch-size", "some"], "--batch-size: 'some' is not a whole number of at least 1"),
        (["--validate", "sometimes"], "--validate: invalid choice: 'sometimes'"),
        (["--test-files", "x.npz"], "--test-files goes with --train-files"),
        (["--save-history", "/no/such/folder/x.json"], "the folder /no/such/folder is not there"),
        (["--method", "downpur"], "--method: invalid choice: 'downpur'"),
        (["--set", "4"], "--set: '4' is not NAME=VALUE, such as sync_every=4"),
        (["--rank", "1", "--world-size", "2"], "--rank is for --backend gloo or nccl"),
        (["--rank", "2", "--world-size", "2", "--backend", "gloo"], "--rank 2 is not below --world-size 2"),
        (["--backend", "nccl", "--no-cuda"], "nccl needs an NVIDIA GPU, and --no-cuda was given"),
    ],
)
def test_bad_options_are_one_line_and_status_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    def never(ranks: int, options: list[str]) -> int:
        raise AssertionError("started ranks all the same")

    try:
        status = program.main(argv, relaunch=never)
    except SystemExit as leaving:
        status = leaving.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert status == 2 and said.out == ""
    assert said.err.startswith("labkit train: ") and words in said.err and said.err.count("\n") == 1


def test_a_world_of_several_is_started_under_mpiexec_with_the_same_options() -> None:
    asked = []

    def relaunch(ranks: int, options: list[str]) -> int:
        asked.append((ranks, options, program.RELAUNCHED in os.environ))
        return 7

    argv = ["--world-size", "4", "--model", "lenet"]
    assert program.main(argv, relaunch=relaunch) == 7
    assert asked == [(4, argv, True)]
    assert program.RELAUNCHED not in os.environ


def test_another_world_than_mpiexecs_is_refused_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert program.main(["--world-size", "3"]) == 2
    assert "--world-size 3, but mpiexec started 2 ranks" in capsys.readouterr().err
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert program.main(["--world-size", "3"]) == 2
    assert capsys.readouterr().err == ""


def test_ranks_of_a_launcher_that_says_nothing_do_not_start_more_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(program.RELAUNCHED, "1")
    assert program.main(["--world-size", "4"]) == 2
    assert "it does not say so" in capsys.readouterr().err


def test_times_are_printed_as_the_shell_does() -> None:
    assert times(3601.5, 59.9996, 0.0) == "real 60m1.500s\nuser 1m0.000s\nsys 0m0.000s"
