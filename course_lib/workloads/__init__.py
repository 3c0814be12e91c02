"""What is trained: image data sets and residual networks, text and a small GPT.

Everything here is ordinary PyTorch that knows nothing of ranks, snapshots or restarts; ``course_lib.engine``
knows nothing of images or text. Optional packages (torchvision, Pillow) are imported only when asked for.
"""
