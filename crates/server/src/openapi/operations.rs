//! What each route takes and replies. `components.json` has the parameters and schemas by name.

use http::Method;

/// A body of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestBody {
    /// None.
    Absent,
    /// JSON of this schema, or no body.
    OptionalJson(&'static str),
    /// JSON of this schema.
    Json(&'static str),
    /// A multipart form of this schema.
    Form(&'static str),
    /// An inference: JSON, or JSON and binary tensors.
    Inference,
    /// An inference of a query, which may be a picture.
    QueryInference,
    /// A query in TOML or JSON.
    Query,
}

/// A successful reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Success {
    /// Without a body.
    Empty,
    /// JSON of this schema.
    Json(&'static str),
    /// JSON, or JSON and binary tensors.
    Inference,
    /// Something else, of this media type.
    Media(&'static str),
}

/// A method of a route.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) method: Method,
    pub(super) path: &'static str,
    pub(super) tag: &'static str,
    pub(super) id: &'static str,
    pub(super) summary: &'static str,
    /// Parameters beside those in the path.
    pub(super) parameters: &'static [&'static str],
    pub(super) body: RequestBody,
    pub(super) success: Success,
    /// Statuses of errors beside those that follow from the rest.
    pub(super) errors: &'static [u16],
    /// Whether its 503 has no body.
    pub(super) empty_unavailable: bool,
}

impl Operation {
    fn json(self, schema: &'static str) -> Operation {
        Operation { success: Success::Json(schema), ..self }
    }

    fn media(self, kind: &'static str) -> Operation {
        Operation { success: Success::Media(kind), ..self }
    }

    fn infers(self) -> Operation {
        let errors = &[400, 404, 429, 501, 502, 503, 504];
        let parameters = &["header_length", "traceparent", "canary", "canary_key"];
        Operation { success: Success::Inference, errors, parameters, ..self }
    }

    fn takes(self, body: RequestBody) -> Operation {
        Operation { body, ..self }
    }

    fn with(self, parameters: &'static [&'static str]) -> Operation {
        Operation { parameters, ..self }
    }

    fn fails(self, errors: &'static [u16]) -> Operation {
        Operation { errors, ..self }
    }

    fn unavailable_without_body(self) -> Operation {
        Operation { empty_unavailable: true, ..self }
    }
}

fn operation(
    method: Method,
    path: &'static str,
    id: &'static str,
    summary: &'static str,
) -> Operation {
    Operation {
        method,
        path,
        tag: "",
        id,
        summary,
        parameters: &[],
        body: RequestBody::Absent,
        success: Success::Empty,
        errors: &[],
        empty_unavailable: false,
    }
}

fn get(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    operation(Method::GET, path, id, summary)
}

fn post(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    operation(Method::POST, path, id, summary)
}

fn put(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    operation(Method::PUT, path, id, summary)
}

fn patch(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    operation(Method::PATCH, path, id, summary)
}

fn delete(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    operation(Method::DELETE, path, id, summary)
}

/// All operations, by area.
pub(super) fn all() -> Vec<Operation> {
    let areas = [
        ("Server", server()),
        ("Inference", inference()),
        ("Models", models()),
        ("Repository", repository()),
        ("Registry", registry()),
        ("Canaries", canaries()),
        ("Watching", watching()),
        ("Queries", queries()),
        ("Console", console()),
    ];
    let tagged = |(tag, operations): (&'static str, Vec<Operation>)| {
        operations.into_iter().map(move |operation| Operation { tag, ..operation })
    };
    areas.into_iter().flat_map(tagged).collect()
}

fn server() -> Vec<Operation> {
    vec![
        get("/v2", "server_metadata", "Name, version and extensions").json("ServerMetadata"),
        get("/v2/", "server_metadata_slash", "The same as `/v2`").json("ServerMetadata"),
        get("/v2/health/live", "live", "Whether the server runs"),
        get("/v2/health/ready", "ready", "Whether the server accepts requests")
            .fails(&[503])
            .unavailable_without_body(),
        get("/v2/atoll/status", "status", "Readiness, requests in flight, models")
            .json("Status")
            .fails(&[503]),
        get("/metrics", "metrics", "Metrics in the Prometheus text format; on the admin port")
            .media("text/plain"),
    ]
}

fn inference() -> Vec<Operation> {
    let images = RequestBody::Form("ClassifyForm");
    let fails = &[400, 404, 501, 503, 504];
    vec![
        post("/v2/models/{model}/infer", "infer", "Runs a model")
            .takes(RequestBody::Inference)
            .infers(),
        post("/v2/models/{model}/versions/{version}/infer", "infer_version", "Runs a version")
            .takes(RequestBody::Inference)
            .infers(),
        post("/v2/atoll/classify", "classify", "The best classes of an image")
            .takes(images)
            .json("Classification")
            .fails(fails),
        post("/classify", "classify_short", "The same as `/v2/atoll/classify`")
            .takes(images)
            .json("Classification")
            .fails(fails),
    ]
}

fn models() -> Vec<Operation> {
    vec![
        get("/v2/models/{model}", "model_metadata", "Versions, inputs and outputs of a model")
            .json("ModelMetadata")
            .fails(&[503]),
        get("/v2/models/{model}/versions/{version}", "version_metadata", "The same of one version")
            .json("ModelMetadata")
            .fails(&[503]),
        get("/v2/models/{model}/ready", "model_ready", "Whether a model is ready")
            .fails(&[503])
            .unavailable_without_body(),
        get(
            "/v2/models/{model}/versions/{version}/ready",
            "version_ready",
            "Whether a version is ready",
        )
        .fails(&[503])
        .unavailable_without_body(),
        get("/v2/models/{model}/config", "model_config", "Configuration of a model")
            .json("ModelConfig")
            .fails(&[503]),
        get(
            "/v2/models/{model}/versions/{version}/config",
            "version_config",
            "Configuration of a version",
        )
        .json("ModelConfig")
        .fails(&[503]),
        get("/v2/models/stats", "statistics", "Statistics of all models").json("Statistics"),
        get("/v2/models/{model}/stats", "model_statistics", "Statistics of a model")
            .json("Statistics")
            .fails(&[503]),
        get(
            "/v2/models/{model}/versions/{version}/stats",
            "version_statistics",
            "Statistics of a version",
        )
        .json("Statistics")
        .fails(&[503]),
        get("/v2/atoll/models/{model}", "model_details", "Settings and launch plan of a model")
            .json("ModelDetails")
            .fails(&[501, 503]),
    ]
}

fn repository() -> Vec<Operation> {
    let load = RequestBody::OptionalJson("LoadRequest");
    vec![
        post("/v2/repository/index", "index", "Models, versions and states")
            .takes(RequestBody::OptionalJson("IndexRequest"))
            .json("Index")
            .fails(&[400, 503]),
        post(
            "/v2/repository/models/{model}/load",
            "load",
            "Loads a model; replies when it is ready",
        )
        .takes(load)
        .fails(&[501, 503]),
        post(
            "/v2/repository/models/{model}/unload",
            "unload",
            "Unloads a model; replies when its last request is done",
        )
        .takes(load)
        .fails(&[501, 503]),
    ]
}

fn registry() -> Vec<Operation> {
    let form = RequestBody::Form("RegisterForm");
    let fails = &[400, 501, 503];
    vec![
        post("/v2/atoll/register", "register", "Keeps a model and loads it")
            .takes(form)
            .json("Registered")
            .fails(fails),
        post("/register", "register_short", "The same as `/v2/atoll/register`")
            .takes(form)
            .json("Registered")
            .fails(fails),
        patch(
            "/v2/atoll/models/{model}",
            "change_settings",
            "Changes settings of a loaded model; no request is lost",
        )
        .takes(RequestBody::Json("SettingsChange"))
        .json("ChangedSettings")
        .fails(fails),
        delete("/v2/atoll/models/{model}", "delete_model", "Deletes a registered model")
            .json("Deleted")
            .fails(&[501, 503]),
        delete(
            "/v2/atoll/models/{model}/versions/{version}",
            "delete_version",
            "Deletes a registered version",
        )
        .json("Deleted")
        .fails(&[501, 503]),
        post(
            "/v2/atoll/models/{model}/rollback",
            "roll_back",
            "Serves the registered version before the current one",
        )
        .json("Registered")
        .fails(&[501, 503]),
        post(
            "/v2/atoll/models/{model}/versions/{version}/rollback",
            "roll_back_to",
            "Serves this older registered version",
        )
        .json("Registered")
        .fails(&[501, 503]),
    ]
}

fn canaries() -> Vec<Operation> {
    let options = RequestBody::Json("CanaryOptions");
    vec![
        get("/v2/atoll/models/{model}/canary", "canary", "The canary of a model, or the last one")
            .json("Canary")
            .fails(&[501, 503]),
        post(
            "/v2/atoll/models/{model}/canary",
            "start_canary",
            "Serves the newest registered version beside the one in force",
        )
        .takes(options)
        .json("Canary")
        .fails(&[400, 501, 503]),
        post(
            "/v2/atoll/models/{model}/versions/{version}/canary",
            "start_canary_of",
            "Serves this registered version beside the one in force",
        )
        .takes(options)
        .json("Canary")
        .fails(&[400, 501, 503]),
        post(
            "/v2/atoll/models/{model}/canary/promote",
            "promote_canary",
            "Puts the canary in force",
        )
        .json("Canary")
        .fails(&[501, 503]),
        post(
            "/v2/atoll/models/{model}/canary/abort",
            "abort_canary",
            "Gives all requests to the version in force",
        )
        .json("Canary")
        .fails(&[501, 503]),
    ]
}

fn watching() -> Vec<Operation> {
    vec![
        post(
            "/v2/atoll/models/{model}/steps",
            "model_steps",
            "Measures the steps of a model as best effort, and lists the slowest",
        )
        .json("ModelSteps")
        .fails(&[501, 503]),
        get("/v2/atoll/live", "watch", "Figures and spans as an endless stream of frames")
            .with(&["spans", "interval_ms", "position"])
            .media("application/octet-stream")
            .fails(&[400, 501]),
        get("/v2/atoll/trace", "trace", "The last seconds, for ui.perfetto.dev")
            .with(&["seconds"])
            .json("Trace")
            .fails(&[400, 501]),
        get(
            "/v2/atoll/trace/devices/{device}/requests/{request}",
            "explain",
            "Why a request took as long as it did",
        )
        .json("Explanation")
        .fails(&[501]),
        get("/v2/atoll/cluster", "cluster", "Backends, routes and plan of a cluster")
            .json("Cluster"),
        post("/v2/atoll/plan", "plan", "Plans GPUs for services")
            .takes(RequestBody::Json("PlanRequest"))
            .json("Plan")
            .fails(&[400, 501, 503, 504]),
    ]
}

fn queries() -> Vec<Operation> {
    let fails = &[501, 503];
    vec![
        get("/v2/atoll/queries", "queries", "All queries").json("Queries").fails(&[501]),
        get("/v2/atoll/queries/{query}", "query", "A query with its stages and times")
            .json("Query")
            .fails(fails),
        put("/v2/atoll/queries/{query}", "put_query", "Keeps a query")
            .takes(RequestBody::Query)
            .json("Query")
            .fails(fails),
        delete("/v2/atoll/queries/{query}", "delete_query", "Forgets a query").fails(fails),
        post("/v2/atoll/queries/{query}/infer", "infer_query", "Runs a query")
            .takes(RequestBody::QueryInference)
            .infers(),
    ]
}

fn console() -> Vec<Operation> {
    vec![
        get("/", "console", "The console").media("text/html"),
        get("/docs", "docs", "This description as a page").media("text/html"),
        get("/console/{file}", "console_file", "A file of the console").media("*/*"),
        get("/openapi.json", "openapi", "This description").media("application/json"),
    ]
}
