"""The classroom: launching, breaking, drawing and checking. It is not meant for production."""
