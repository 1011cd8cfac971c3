"""What all programs are trained on."""

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("document") / "text.txt"
    path.write_text("".join(f"Line {n} of a document that is long enough: {n * n} is the square of {n}.\n" for n in range(60)))
    return path
