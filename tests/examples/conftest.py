"""What all programs are trained on."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from more threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("document") / "text.txt"
    path.write_text("".join(f"Line {n} of a document that is long enough: {n * n} is the square of {n}.\n" for n in range(60)))
    return path
