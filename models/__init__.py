"""Decoder models from the files that publishers ship: `load`, and what it returns."""

from models.config import ModelConfig
from models.decoder import Decoder
from models.registry import NAMES, Model, load
from models.tokenizer import Tokenizer

__all__ = ["NAMES", "Decoder", "Model", "ModelConfig", "Tokenizer", "load"]
