//! Refuses the fields of `config.pbtxt` that change behaviour in Triton and that Atoll does not
//! implement. An error names the field and says what to do instead.

use super::PbtxtError;
use super::text_format::Value;

/// Fields of the model itself that are read as settings, or that change nothing Atoll does.
const ACCEPTED: [&str; 17] = [
    "backend",
    "default_model_filename",
    "dynamic_batching",
    "input",
    "instance_group",
    "max_batch_size",
    "metric_tags",
    "model_metrics",
    "model_transaction_policy",
    "name",
    "optimization",
    "output",
    "parameters",
    "platform",
    "response_cache",
    "runtime",
    "version_policy",
];

/// Fields that are refused with any value, with advice.
const REFUSED: [(&str, &str); 9] = [
    ("batch_input", "give the model these tensors as ordinary inputs"),
    ("batch_output", "let the model write ordinary outputs"),
    ("cc_model_filenames", "keep one model.onnx per version folder"),
    (
        "ensemble_scheduling",
        "call the models one after the other, or merge them into one ONNX file",
    ),
    ("model_operations", "custom operator libraries cannot be loaded; use standard ONNX operators"),
    ("model_repository_agents", "prepare the model files before Atoll reads them"),
    ("model_warmup", "remove it: Atoll compiles and profiles a model before it serves requests"),
    ("rate_limiter", "use the class and priority of models and requests instead"),
    ("sequence_batching", "only stateless models are served; pass the state as inputs and outputs"),
];

/// Fields of an instance group that are refused with any value, with advice.
const REFUSED_OF_GROUP: [(&str, &str); 6] = [
    ("gpus", "select devices with --device"),
    ("host_policy", "select devices with --device"),
    ("passive", "remove it"),
    ("profile", "remove it: kernels are compiled for the sizes that requests have"),
    ("rate_limiter", "use the class and priority of models and requests instead"),
    ("secondary_devices", "select devices with --device"),
];

/// Fails for the first field that is not supported.
pub(super) fn check(fields: &[(String, Value)]) -> Result<(), PbtxtError> {
    for (name, value) in fields {
        check_field(name, value)?;
    }
    if fields.iter().filter(|(name, _)| name == "instance_group").count() > 1 {
        return refuse(
            "instance_group",
            "has more than one group; remove it and select devices with --device",
        );
    }
    Ok(())
}

fn check_field(name: &str, value: &Value) -> Result<(), PbtxtError> {
    if let Some((_, advice)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
        return refuse(name, &format!("is not supported; {advice}"));
    }
    match name {
        "version_policy" => check_version_policy(value),
        "instance_group" => check_instance_group(value),
        "response_cache" if is_set(value, "enable") => {
            refuse("response_cache", "is not supported; remove it: every request is computed")
        }
        "model_transaction_policy" if is_set(value, "decoupled") => refuse(
            "model_transaction_policy.decoupled",
            "is not supported; each request gets exactly one reply",
        ),
        "default_model_filename" if !matches!(value.text(), Some("" | "model.onnx")) => {
            refuse("default_model_filename", "is not supported; name the file model.onnx")
        }
        "optimization" => match value.field("priority").and_then(Value::text) {
            None | Some("PRIORITY_DEFAULT" | "0") => Ok(()),
            Some(_) => refuse(
                "optimization.priority",
                "is not supported; set the parameter atoll_class to 'rt' or 'be'",
            ),
        },
        "input" | "output" => check_tensor(name, value),
        "dynamic_batching" => check_batching(value),
        known if ACCEPTED.contains(&known) => Ok(()),
        _ => refuse(name, "is not a known field; remove it"),
    }
}

/// Atoll serves the highest version, which is also Triton's default.
fn check_version_policy(value: &Value) -> Result<(), PbtxtError> {
    let advice = "the highest version is served; remove the field and keep the version folders \
                  you want";
    for (name, choice) in value.fields() {
        let count = choice.field("num_versions").and_then(Value::text);
        if name != "latest" || !matches!(count, None | Some("1")) {
            return refuse(
                &format!("version_policy.{name}"),
                &format!("is not supported; {advice}"),
            );
        }
    }
    Ok(())
}

/// One instance, on the device that the server selects.
fn check_instance_group(value: &Value) -> Result<(), PbtxtError> {
    for (name, field) in value.fields() {
        let of_group = format!("instance_group.{name}");
        if let Some((_, advice)) = REFUSED_OF_GROUP.iter().find(|(refused, _)| refused == name) {
            return refuse(&of_group, &format!("is not supported; {advice}"));
        }
        match name.as_str() {
            "count" if field.number("instance_group.count")? > 1 => {
                return refuse(
                    &of_group,
                    "above 1 is not supported; remove it: one instance runs batches and several \
                     requests at once",
                );
            }
            "kind" => match field.text() {
                Some("KIND_AUTO" | "KIND_CPU" | "KIND_GPU" | "0" | "1" | "2") => {}
                Some(kind) => {
                    return refuse(
                        &of_group,
                        &format!("{kind} is not supported; use KIND_CPU or KIND_GPU"),
                    );
                }
                None => return refuse(&of_group, "is not an identifier"),
            },
            "count" | "name" => {}
            _ => return refuse(&of_group, "is not a known field; remove it"),
        }
    }
    Ok(())
}

fn check_tensor(direction: &str, value: &Value) -> Result<(), PbtxtError> {
    let name = |field: &str| format!("{direction}.{field}");
    if value.field("reshape").is_some() {
        return refuse(&name("reshape"), "is not supported; requests use the model's own shapes");
    }
    let flags = [
        ("allow_ragged_batch", "pad the inputs of a batch to one shape"),
        ("is_shape_tensor", "shapes are ordinary tensors"),
        ("is_non_linear_format_io", "tensors are dense and row-major"),
        ("optional", "requests give every input"),
    ];
    match flags.iter().find(|(flag, _)| is_set(value, flag)) {
        None => Ok(()),
        Some((flag, advice)) => refuse(&name(flag), &format!("is not supported; {advice}")),
    }
}

fn check_batching(value: &Value) -> Result<(), PbtxtError> {
    if is_set(value, "preserve_ordering") {
        return refuse(
            "dynamic_batching.preserve_ordering",
            "is not supported; match replies to requests by their id",
        );
    }
    if value.field("priority_queue_policy").is_some() {
        return refuse(
            "dynamic_batching.priority_queue_policy",
            "is not supported; use default_queue_policy, and deadlines of requests",
        );
    }
    let policy = value.field("default_queue_policy");
    match policy.and_then(|policy| policy.field("timeout_action")).and_then(Value::text) {
        None | Some("REJECT" | "0") => Ok(()),
        Some(_) => refuse(
            "dynamic_batching.default_queue_policy.timeout_action",
            "DELAY is not supported; a request whose deadline passed is refused (REJECT)",
        ),
    }
}

/// Whether the boolean field `name` is true, in any spelling of the text format.
fn is_set(value: &Value, name: &str) -> bool {
    matches!(value.field(name).and_then(Value::text), Some("true" | "True" | "t" | "1"))
}

fn refuse(field: &str, reason: &str) -> Result<(), PbtxtError> {
    Err(PbtxtError::Unsupported(format!("'{field}' {reason}")))
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use std::path::Path;

    /// Asserts that `text` is refused with an error that quotes `field` and gives advice.
    fn assert_refused(text: &str, field: &str) {
        let message = parse(text, Path::new(".")).unwrap_err().to_string();
        assert!(message.starts_with(&format!("'{field}' ")), "{text}: {message}");
        assert!(message.contains(';'), "{text}: {message}");
    }

    fn assert_accepted(text: &str) {
        if let Err(error) = parse(text, Path::new(".")) {
            panic!("{text}: {error}");
        }
    }

    #[test]
    fn refuses_fields_without_counterpart() {
        for field in [
            "batch_input",
            "batch_output",
            "cc_model_filenames",
            "ensemble_scheduling",
            "model_operations",
            "model_repository_agents",
            "model_warmup",
            "rate_limiter",
            "sequence_batching",
        ] {
            assert_refused(&format!("{field} {{ }}"), field);
        }
        assert_refused("model_warmup [ { name: 'one' batch_size: 1 } ]", "model_warmup");
        assert_refused("respnse_cache { enable: true }", "respnse_cache");
    }

    #[test]
    fn refuses_response_cache_only_if_enabled() {
        assert_refused("response_cache { enable: true }", "response_cache");
        assert_accepted("response_cache { enable: false }");
        assert_accepted("response_cache { }");
    }

    #[test]
    fn refuses_version_policies_other_than_latest() {
        assert_refused("version_policy: { all { } }", "version_policy.all");
        assert_refused(
            "version_policy { specific { versions: [1, 3] } }",
            "version_policy.specific",
        );
        assert_refused("version_policy { latest { num_versions: 2 } }", "version_policy.latest");
        assert_accepted("version_policy { latest { num_versions: 1 } }");
        assert_accepted("version_policy { latest { } }");
    }

    #[test]
    fn refuses_instance_groups_that_are_not_one_instance() {
        assert_refused("instance_group [ { count: 2 } ]", "instance_group.count");
        assert_refused("instance_group [ { kind: KIND_MODEL } ]", "instance_group.kind");
        assert_refused("instance_group [ { gpus: [ 0 ] kind: KIND_GPU } ]", "instance_group.gpus");
        let limited = "instance_group [ { rate_limiter { priority: 2 } } ]";
        assert_refused(limited, "instance_group.rate_limiter");
        for field in ["host_policy", "passive", "profile", "secondary_devices"] {
            let text = format!("instance_group [ {{ {field}: 'x' }} ]");
            assert_refused(&text, &format!("instance_group.{field}"));
        }
        let two = "instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU } ]";
        assert_refused(two, "instance_group");
        assert_accepted("instance_group [ { name: 'a' count: 1 kind: KIND_GPU } ]");
        assert_accepted("instance_group [ { kind: KIND_CPU } ]");
    }

    #[test]
    fn refuses_decoupled_replies() {
        let text = "model_transaction_policy { decoupled: true }";
        assert_refused(text, "model_transaction_policy.decoupled");
        assert_accepted("model_transaction_policy { decoupled: false }");
    }

    #[test]
    fn refuses_other_file_names() {
        assert_refused("default_model_filename: 'net.onnx'", "default_model_filename");
        assert_accepted("default_model_filename: 'model.onnx'");
    }

    #[test]
    fn refuses_model_priority_among_optimizations() {
        assert_refused("optimization { priority: PRIORITY_MAX }", "optimization.priority");
        assert_accepted("optimization { graph { level: 1 } priority: PRIORITY_DEFAULT }");
    }

    #[test]
    fn refuses_tensors_that_differ_from_the_model() {
        assert_refused("input [ { name: 'x' reshape { shape: [ ] } } ]", "input.reshape");
        assert_refused("output [ { name: 'y' reshape { shape: [ ] } } ]", "output.reshape");
        assert_refused("input [ { allow_ragged_batch: true } ]", "input.allow_ragged_batch");
        assert_refused("input [ { optional: true } ]", "input.optional");
        assert_refused("output [ { is_shape_tensor: true } ]", "output.is_shape_tensor");
        assert_accepted("input [ { name: 'x' format: FORMAT_NCHW optional: false } ]");
    }

    #[test]
    fn refuses_batching_options_without_counterpart() {
        let batching = |text: &str| format!("dynamic_batching {{ {text} }}");
        assert_refused(&batching("preserve_ordering: true"), "dynamic_batching.preserve_ordering");
        assert_refused(
            &batching("priority_queue_policy { key: 1 value: { } }"),
            "dynamic_batching.priority_queue_policy",
        );
        assert_refused(
            &batching("default_queue_policy { timeout_action: DELAY }"),
            "dynamic_batching.default_queue_policy.timeout_action",
        );
        assert_accepted(&batching("default_queue_policy { timeout_action: REJECT }"));
    }
}
