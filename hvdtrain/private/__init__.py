"""What hvdtrain uses of PyTorch and of Keras that they do not document: a new release of theirs is one diff here.

Each module names the functions and classes, which are imported from nowhere else, and the attributes, which are read
where they are needed.
"""
