"""What every test has: the same random numbers in each run, alone or after others."""

import random

import numpy
import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
