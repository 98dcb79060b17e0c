//! Checks a query against its models: that they exist, have the inputs and outputs that it names,
//! and that what one stage gives another has the right type and shape.

use api::{ModelMetadata, TensorMetadata};

use super::spec::{Checked, Feed, PictureFeed, Reference, Size, SpecError, StageSpec};
use model::config::{ChannelOrder, ImageLayout};

/// What is known of a model.
pub enum KnownModel<'a> {
    /// There is none of this name.
    Missing,
    /// No backend serves it now, so its inputs and outputs are not known.
    NotServed,
    /// It is served.
    Served(&'a ModelMetadata),
}

/// Outputs that a query adds to those of a model.
const OWN_OUTPUTS: [&str; 3] = ["text", "score", "region"];

/// Checks `query` against its models, of which `find` knows what there is to know.
///
/// # Errors
/// When a model is missing or does not fit; the message names the stage.
pub fn check_models<'a>(
    query: &Checked,
    find: impl Fn(&str) -> KnownModel<'a>,
) -> Result<(), SpecError> {
    for (index, stage) in query.spec.stages.iter().enumerate() {
        let refuse = |why: String| Err(SpecError(format!("stage '{}': {why}", stage.name)));
        let metadata = match find(&stage.model) {
            KnownModel::Missing => return refuse(format!("there is no model '{}'", stage.model)),
            KnownModel::NotServed => continue,
            KnownModel::Served(metadata) => metadata,
        };
        check_names(query, index, metadata).or_else(refuse)?;
        for (name, feed) in &stage.inputs {
            let Some(input) = metadata.inputs.iter().find(|input| input.name == *name) else {
                continue;
            };
            match feed {
                Feed::Picture(picture) => check_picture(picture, input).or_else(refuse)?,
                Feed::Value(value) => {
                    let from = query.spec.reference(index, value);
                    let Ok(Reference::Output(parent, output)) = from else { continue };
                    let parent_stage = &query.spec.stages[parent];
                    // Rows of a fan-out are checked by the model that gets them.
                    if query.chains[parent] != query.chains[index] {
                        continue;
                    }
                    if let KnownModel::Served(model) = find(&parent_stage.model)
                        && let Some(given) = model.outputs.iter().find(|o| o.name == output)
                    {
                        check_tensor(value, given, input).or_else(refuse)?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn listed(tensors: &[TensorMetadata]) -> String {
    tensors.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn check_names(query: &Checked, index: usize, metadata: &ModelMetadata) -> Result<(), String> {
    let stage: &StageSpec = &query.spec.stages[index];
    let model = &stage.model;
    for name in stage.inputs.keys() {
        if !metadata.inputs.iter().any(|input| input.name == *name) {
            let there = listed(&metadata.inputs);
            return Err(format!("model '{model}' has no input '{name}'; it has {there}"));
        }
    }
    if let Some(input) = metadata.inputs.iter().find(|i| !stage.inputs.contains_key(&i.name)) {
        return Err(format!("nothing is given for input '{}' of model '{model}'", input.name));
    }
    for name in query.needed_outputs(index) {
        let own = OWN_OUTPUTS.contains(&name.as_str());
        if !own && !metadata.outputs.iter().any(|output| output.name == name) {
            let there = listed(&metadata.outputs);
            return Err(format!("model '{model}' has no output '{name}'; it has {there}"));
        }
    }
    Ok(())
}

/// Whether two sizes can be equal; -1 is any.
fn fits(given: i64, wanted: i64) -> bool {
    given < 0 || wanted < 0 || given == wanted
}

fn check_tensor(name: &str, given: &TensorMetadata, input: &TensorMetadata) -> Result<(), String> {
    if given.datatype != input.datatype {
        let (given, wanted) = (&given.datatype, &input.datatype);
        return Err(format!("'{name}' is {given}, and input '{}' is {wanted}", input.name));
    }
    // The first dimension is that of batches.
    let same = given.shape.len() == input.shape.len()
        && given.shape.iter().zip(&input.shape).skip(1).all(|(a, b)| fits(*a, *b));
    match same {
        true => Ok(()),
        false => Err(format!(
            "'{name}' has shape {:?}, and input '{}' has {:?}",
            given.shape, input.name, input.shape
        )),
    }
}

fn check_picture(picture: &PictureFeed, input: &TensorMetadata) -> Result<(), String> {
    let channels = if picture.channels == ChannelOrder::Gray { 1 } else { 3 };
    let (height, width) = match picture.size {
        Size::Exact { width, height } => (i64::from(height), i64::from(width)),
        Size::Line { height, .. } => (i64::from(height), -1),
        Size::Whole { .. } => (-1, -1),
    };
    let made = match picture.layout {
        ImageLayout::Nchw => [-1, channels, height, width],
        ImageLayout::Nhwc => [-1, height, width, channels],
    };
    let same = input.shape.len() == 4 && made.iter().zip(&input.shape).all(|(a, b)| fits(*a, *b));
    match same {
        true => Ok(()),
        false => Err(format!(
            "the picture becomes {made:?}, and input '{}' has {:?}; -1 is any size",
            input.name, input.shape
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::spec::QuerySpec;
    use super::*;

    fn tensor(name: &str, datatype: &str, shape: &[i64]) -> TensorMetadata {
        TensorMetadata {
            name: name.to_string(),
            datatype: datatype.to_string(),
            shape: shape.to_vec(),
        }
    }

    fn model(inputs: Vec<TensorMetadata>, outputs: Vec<TensorMetadata>) -> ModelMetadata {
        let name = String::new();
        ModelMetadata { name, versions: Vec::new(), platform: String::new(), inputs, outputs }
    }

    fn refusal(size: &str, second: &str, output: &str) -> Option<String> {
        let text = format!(
            "slo_ms = 100\n[[stage]]\nname = \"first\"\nmodel = \"features\"\n\
             inputs.image.picture = {{ of = \"photo\", size.exact = {size} }}\n\
             [[stage]]\nname = \"second\"\nmodel = \"{second}\"\n\
             inputs.x.value = \"first.vector\"\n[output]\nresult = \"second.{output}\"\n"
        );
        let query = QuerySpec::read(&text).unwrap().check().unwrap();
        let features = model(
            vec![tensor("image", "FP32", &[-1, 3, 224, 224])],
            vec![tensor("vector", "FP32", &[-1, 128])],
        );
        let of = |shape: &[i64], datatype: &str| {
            model(vec![tensor("x", datatype, shape)], vec![tensor("y", "FP32", &[-1, 10])])
        };
        let heads = [
            ("fits", of(&[-1, 128], "FP32")),
            ("narrow", of(&[-1, 64], "FP32")),
            ("flat", of(&[-1], "FP32")),
            ("bytes", of(&[-1, 128], "UINT8")),
        ];
        let mut two = of(&[-1, 128], "FP32");
        two.inputs.push(tensor("more", "FP32", &[1]));
        let find = |name: &str| match name {
            "features" => KnownModel::Served(&features),
            "two" => KnownModel::Served(&two),
            "loading" => KnownModel::NotServed,
            _ => match heads.iter().find(|(head, _)| *head == name) {
                Some((_, metadata)) => KnownModel::Served(metadata),
                None => KnownModel::Missing,
            },
        };
        check_models(&query, find).err().map(|error| error.to_string())
    }

    #[test]
    fn a_query_must_fit_its_models() {
        let size = "{ width = 224, height = 224 }";
        assert_eq!(refusal(size, "fits", "y"), None);
        assert_eq!(refusal(size, "loading", "y"), None);
        for (second, output, expected) in [
            ("absent", "y", "stage 'second': there is no model 'absent'"),
            ("fits", "z", "has no output 'z'; it has y"),
            ("narrow", "y", "has shape [-1, 128], and input 'x' has [-1, 64]"),
            ("flat", "y", "has shape [-1, 128], and input 'x' has [-1]"),
            ("bytes", "y", "'first.vector' is FP32, and input 'x' is UINT8"),
            ("two", "y", "nothing is given for input 'more'"),
        ] {
            let why = refusal(size, second, output).unwrap_or_default();
            assert!(why.contains(expected), "{second}: {why}");
        }
        let why = refusal("{ width = 32, height = 224 }", "fits", "y").unwrap_or_default();
        assert!(why.contains("the picture becomes [-1, 3, 224, 32]"), "{why}");
    }
}
