"""Activation checkpointing goes by the name that a version of transformers has for it."""

import pytest

from tigon.fusion.memory.checkpointing import checkpoint_activations

pytest.importorskip("transformers")


class Old:
    def __init__(self):
        self.asked = {}

    def gradient_checkpointing_enable(self, **options):
        self.asked["gradient_checkpointing_enable"] = options


class New(Old):
    def activation_checkpointing_enable(self, **options):
        self.asked["activation_checkpointing_enable"] = options


def test_the_newer_name_is_taken_where_there_is_one():
    old, new = Old(), New()
    checkpoint_activations(old)
    checkpoint_activations(new)
    without_reentrance = {"use_reentrant": False}
    assert old.asked == {"gradient_checkpointing_enable": {"gradient_checkpointing_kwargs": without_reentrance}}
    assert new.asked == {"activation_checkpointing_enable": {"activation_checkpointing_kwargs": without_reentrance}}
