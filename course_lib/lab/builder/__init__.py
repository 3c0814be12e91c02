"""Builds the notebooks from their sources; `scripts/build_notebooks.py` calls it.

`notebooks/src/NN_name.py` is a notebook in jupytext's percent format. It becomes `notebooks/NN_name.ipynb`, in which
the exercises are open, and `notebooks/solutions/NN_name.ipynb`, which has the solved ones and what they need.
"""
