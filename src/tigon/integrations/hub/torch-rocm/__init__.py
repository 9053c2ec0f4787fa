"""The layers in the installed package, which `kernels` imports from this repository in place of a build."""

from tigon.integrations.hub import layers as layers
