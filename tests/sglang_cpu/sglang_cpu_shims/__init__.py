"""What SGLang 0.5.23 lacks on a machine without a GPU; for test environments only.

torchvision_schemas   lets torchvision's CUDA wheel be imported beside a CPU build of torch
moe                   an SGLang plugin: the CPU expert forward skips experts that live on other ranks
../sgl_kernel         names SGLang imports from its kernel package, which has no CPU wheel
"""
