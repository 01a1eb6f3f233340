"""verl reads its platform once a process, and the tests of a machine without a GPU run on its processors."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")
