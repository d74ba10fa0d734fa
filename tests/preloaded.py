"""What a process of `tests.gloo` has at its birth and else would import for itself: nine tenths of
its start. No thread is started, since processes are forked from here."""

import importlib

import pretrain.train  # noqa: F401
from pretrain.deepspeed_door import deepspeed

importlib.import_module("torch._inductor.compile_fx")
deepspeed()
