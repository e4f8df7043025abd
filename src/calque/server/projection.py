"""Projections of vectors to two dimensions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from calque.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]

ProjectionMethod = Literal["pca", "tsne", "umap"]
MIN_POINTS = 5  # of t-SNE and UMAP
SEED = 0


def project(vectors: Matrix, method: ProjectionMethod) -> Matrix:
    """Return two coordinates of every vector.

    t-SNE needs scikit-learn, and UMAP needs umap-learn; both take seconds. The first UMAP of a
    process takes longer, up to minutes, because its code is compiled.

    >>> project(np.float32([[0, 0, 1], [0, 0, 3], [0, 0, 2]]), "pca").round(2).tolist()
    [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    """
    if method == "pca":
        return project_by_pca(vectors)
    if len(vectors) < MIN_POINTS:
        raise InputError(
            f"{method} needs at least {MIN_POINTS} points", fix="add texts, or choose pca"
        )
    return _project_by_tsne(vectors) if method == "tsne" else _project_by_umap(vectors)


def project_jobs(jobs: Sequence[tuple[Matrix, ProjectionMethod]]) -> list[Matrix]:
    """Return the coordinates of several projections."""
    return [project(vectors, method) for vectors, method in jobs]


def project_by_pca(vectors: Matrix) -> Matrix:
    """Return the first two principal components; the largest weight of each is positive."""
    centered = vectors - vectors.mean(axis=0)
    _, _, directions = np.linalg.svd(centered.astype(np.float64), full_matrices=False)
    axes = np.zeros((2, vectors.shape[1]))
    axes[: len(directions)] = directions[:2]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    points: Matrix = (centered @ (axes * np.where(largest < 0, -1, 1)).T).astype(np.float32)
    return points


def _project_by_tsne(vectors: Matrix) -> Matrix:
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise MissingExtra("scikit-learn", "project") from error
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    points: Matrix = TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(
        vectors
    )
    return points


def _project_by_umap(vectors: Matrix) -> Matrix:
    try:
        import umap
    except ImportError as error:
        raise MissingExtra("umap-learn", "project") from error
    n_neighbors = min(15, len(vectors) - 1)
    with warnings.catch_warnings():  # about the number of threads
        warnings.simplefilter("ignore")
        reducer = umap.UMAP(
            n_neighbors=n_neighbors, init="random", metric="cosine", random_state=SEED, n_jobs=1
        )
        points: Matrix = reducer.fit_transform(vectors)
    return points
