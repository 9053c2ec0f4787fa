"""What `kernels` imports from this repository: the layers of the installed package, in place of a build of its own."""

from tigon.integrations.hub import layers as layers
