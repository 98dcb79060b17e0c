"""Pipelines of scikit-learn, trained on seeded data and exported by skl2onnx."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType
from sklearn import (
    calibration,
    cluster,
    compose,
    cross_decomposition,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_extraction,
    feature_selection,
    gaussian_process,
    impute,
    linear_model,
    mixture,
    multiclass,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

ROWS, COLUMNS = 120, 6
OPSETS = {"": 15, "ai.onnx.ml": 3}


def _data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(24)
    x = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    score = x @ rng.normal(size=COLUMNS)
    return x, np.digitize(score, np.quantile(score, [0.33, 0.66])), score.astype(np.float32)


def _classifier(*steps, labels: bool = False, zipmap: bool = True) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        x, y, _ = _data()
        y = np.array(["low", "middle", "high"])[y] if labels else y
        model = pipeline.make_pipeline(*steps).fit(np.abs(x), y)
        options = {id(model): {"zipmap": zipmap}}
        return to_onnx(model, initial_types=_floats(), options=options)

    return make


def _regressor(*steps) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        x, _, y = _data()
        return to_onnx(pipeline.make_pipeline(*steps).fit(x, y), initial_types=_floats())

    return make


def _transformer(*steps) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        x, y, _ = _data()
        return to_onnx(pipeline.make_pipeline(*steps).fit(np.abs(x), y), initial_types=_floats())

    return make


def _floats() -> list:
    return [("x", FloatTensorType([None, COLUMNS]))]


def _texts(*steps) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        words = ["red", "green", "blue", "a small text", "Another Text", "one"]
        texts = np.array(words * 5)
        model = pipeline.make_pipeline(*steps).fit(texts, np.arange(30) % 2)
        return to_onnx(model, initial_types=[("text", StringTensorType([None]))])

    return make


def _encoder(step, integers: bool = False) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        if integers:
            x, kind = np.array([[0, 1], [1, 0], [2, 1], [0, 2]]), Int64TensorType([None, 2])
        else:
            words = np.array(["red", "green", "blue", "a small text", "Another Text", "one"])
            x, kind = np.stack([words, words[::-1]], axis=1), StringTensorType([None, 2])
        return to_onnx(step.fit(x), initial_types=[("x", kind)])

    return make


def _columns() -> onnx.ModelProto:
    x, y, _ = _data()
    model = pipeline.make_pipeline(
        compose.ColumnTransformer(
            [
                ("scaled", preprocessing.StandardScaler(), [0, 1, 2]),
                ("binned", preprocessing.KBinsDiscretizer(4, encode="onehot-dense"), [3, 4, 5]),
            ]
        ),
        linear_model.LogisticRegression(),
    )
    return to_onnx(model.fit(x, y), initial_types=_floats())


def _outliers(step) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        x, _, _ = _data()
        return to_onnx(step.fit(x), initial_types=_floats(), target_opset=OPSETS)

    return make


_vote = [("a", linear_model.LogisticRegression()), ("b", tree.DecisionTreeClassifier(max_depth=3))]
_scale = preprocessing.StandardScaler
ALL: dict[str, Callable[[], onnx.ModelProto]] = {
    "logistic": _classifier(_scale(), linear_model.LogisticRegression()),
    "logistic_labels": _classifier(_scale(), linear_model.LogisticRegression(), labels=True),
    "logistic_plain": _classifier(linear_model.LogisticRegression(), zipmap=False),
    "ridge_classifier": _classifier(linear_model.RidgeClassifier(), zipmap=False),
    "sgd": _classifier(_scale(), linear_model.SGDClassifier(loss="log_loss", random_state=1)),
    "perceptron": _classifier(linear_model.Perceptron(random_state=1), zipmap=False),
    "forest": _classifier(ensemble.RandomForestClassifier(50, random_state=1)),
    "forest_labels": _classifier(
        ensemble.RandomForestClassifier(20, random_state=1), labels=True, zipmap=False
    ),
    "extra_trees": _classifier(ensemble.ExtraTreesClassifier(40, random_state=1), zipmap=False),
    "boosting": _classifier(ensemble.GradientBoostingClassifier(n_estimators=20, random_state=1)),
    "ada_boost": _classifier(ensemble.AdaBoostClassifier(n_estimators=10, random_state=1)),
    "bagging": _classifier(ensemble.BaggingClassifier(n_estimators=5, random_state=1)),
    "voting": _classifier(
        ensemble.VotingClassifier(_vote, voting="soft", flatten_transform=False), zipmap=False
    ),
    "stacking": _classifier(ensemble.StackingClassifier(_vote), zipmap=False),
    "tree": _classifier(tree.DecisionTreeClassifier(max_depth=6, random_state=1)),
    "svc": _classifier(_scale(), svm.SVC(probability=True, random_state=1)),
    "svc_poly": _classifier(svm.SVC(kernel="poly"), zipmap=False),
    "nu_svc": _classifier(svm.NuSVC(), zipmap=False),
    "linear_svc": _regressor(svm.LinearSVR(random_state=1)),
    "knn": _classifier(neighbors.KNeighborsClassifier(5)),
    "radius": _classifier(neighbors.RadiusNeighborsClassifier(8.0), zipmap=False),
    "gaussian_nb": _classifier(naive_bayes.GaussianNB()),
    "multinomial_nb": _classifier(naive_bayes.MultinomialNB(), zipmap=False),
    "bernoulli_nb": _classifier(naive_bayes.BernoulliNB(), zipmap=False),
    "lda": _classifier(discriminant_analysis.LinearDiscriminantAnalysis()),
    "qda": _classifier(discriminant_analysis.QuadraticDiscriminantAnalysis(), zipmap=False),
    "mlp": _classifier(
        _scale(), neural_network.MLPClassifier(hidden_layer_sizes=(16, 8), random_state=1)
    ),
    "one_vs_rest": _classifier(
        multiclass.OneVsRestClassifier(linear_model.LogisticRegression()), zipmap=False
    ),
    "calibrated": _classifier(calibration.CalibratedClassifierCV(svm.LinearSVC(), cv=3)),
    "linear": _regressor(linear_model.LinearRegression()),
    "lasso": _regressor(_scale(), linear_model.Lasso(0.01)),
    "elastic": _regressor(preprocessing.PolynomialFeatures(2), linear_model.ElasticNet(0.01)),
    "poisson": _regressor(linear_model.HuberRegressor()),
    "forest_regressor": _regressor(ensemble.RandomForestRegressor(50, random_state=1)),
    "boosting_regressor": _regressor(ensemble.GradientBoostingRegressor(random_state=1)),
    "tree_regressor": _regressor(tree.DecisionTreeRegressor(random_state=1)),
    "svr": _regressor(_scale(), svm.SVR()),
    "knn_regressor": _regressor(neighbors.KNeighborsRegressor(3)),
    "mlp_regressor": _regressor(
        _scale(), neural_network.MLPRegressor(hidden_layer_sizes=(16,), random_state=1)
    ),
    "gaussian_process": _regressor(gaussian_process.GaussianProcessRegressor()),
    "bayesian_ridge": _regressor(linear_model.BayesianRidge()),
    "pls": _regressor(cross_decomposition.PLSRegression(2)),
    "pca": _transformer(decomposition.PCA(3)),
    "svd": _transformer(decomposition.TruncatedSVD(3)),
    "kernel_pca": _transformer(decomposition.KernelPCA(3, kernel="rbf")),
    "min_max": _transformer(preprocessing.MinMaxScaler()),
    "robust": _transformer(preprocessing.RobustScaler()),
    "normalizer": _transformer(preprocessing.Normalizer("l1")),
    "binarizer": _transformer(preprocessing.Binarizer(threshold=0.5)),
    "power": _transformer(preprocessing.PowerTransformer()),
    "bins": _transformer(preprocessing.KBinsDiscretizer(3, encode="ordinal")),
    "imputer": _transformer(impute.SimpleImputer()),
    "knn_imputer": _transformer(impute.KNNImputer()),
    "select": _transformer(feature_selection.SelectKBest(k=3)),
    "variance": _transformer(feature_selection.VarianceThreshold(0.1)),
    "k_means": _outliers(cluster.KMeans(4, n_init=1, random_state=1)),
    "mixture": _outliers(mixture.GaussianMixture(3, random_state=1)),
    "isolation": _outliers(ensemble.IsolationForest(n_estimators=20, random_state=1)),
    "outlier_factor": _outliers(neighbors.LocalOutlierFactor(novelty=True)),
    "one_class": _outliers(svm.OneClassSVM()),
    "one_hot": _encoder(preprocessing.OneHotEncoder(sparse_output=False)),
    "one_hot_integers": _encoder(preprocessing.OneHotEncoder(sparse_output=False), integers=True),
    "ordinal": _encoder(preprocessing.OrdinalEncoder()),
    "tf_idf": _texts(feature_extraction.text.TfidfVectorizer(), linear_model.LogisticRegression()),
    "count": _texts(feature_extraction.text.CountVectorizer(ngram_range=(1, 2))),
    "columns": _columns,
}
