"""One file per operator, each from promise to silicon: formula → public op → reference → kernels → launches → autograd."""
