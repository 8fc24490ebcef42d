"""For all tests: no network, one torch thread unless told otherwise, and hypothesis draws the same cases every time,
unless HYPOTHESIS_PROFILE=at-random asks for others."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "same-every-time",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("at-random", settings.get_profile("same-every-time"), derandomize=False, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same-every-time"))
torch.set_num_threads(int(os.environ.get("FOREGLANCE_TEST_THREADS", "1")))
