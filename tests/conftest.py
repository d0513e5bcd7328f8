from __future__ import annotations

import pytest
import torch

from fewbits import embedded, model


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the tests themselves run side by side


@pytest.fixture(scope="session")
def embedded_model() -> model.Model:
    return model.open(embedded.MODEL)
