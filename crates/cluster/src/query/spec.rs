//! A query as a user writes it, in TOML or JSON: models as stages, their inputs, and one SLO.

use std::collections::{BTreeMap, BTreeSet};

use model::config::{ChannelOrder, Class, ImageLayout};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Maximum number of stages.
pub const STAGES_MAX: usize = 32;
/// Maximum number of requests to one stage per query request.
pub const ELEMENTS_MAX: usize = 1024;
/// Maximum edge of a picture that is an input of a model.
const EDGE_MAX: u32 = 8192;

/// A query.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuerySpec {
    /// SLO of the query in milliseconds.
    pub slo_ms: f64,
    /// Class of requests that name none; without it each model's own class applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
    /// The models, each after those whose outputs it reads.
    #[serde(rename = "stage")]
    pub stages: Vec<StageSpec>,
    /// The outputs: names, and where each comes from (`STAGE.OUTPUT`).
    pub output: BTreeMap<String, String>,
}

/// One model of a query.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageSpec {
    /// Its name in the query.
    pub name: String,
    /// The model.
    pub model: String,
    /// How one output of an earlier stage becomes several requests. Without it, there is one
    /// request for each element of the stages it reads from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub each: Option<Each>,
    /// The model's inputs.
    pub inputs: BTreeMap<String, Feed>,
    /// Maximum number of elements of one query request per request to the model.
    #[serde(default = "default_batch")]
    pub batch: usize,
    /// Assumed requests to this stage per query request, until they are measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fan_out: Option<f64>,
    /// Output with scores of characters by position. It is decoded as text with the model's labels,
    /// of which the first is the blank, and adds the outputs `text` and `score`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Score below which the text of a rectangle is read upside down as well; the text with the
    /// higher score counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn_below: Option<f32>,
}

fn default_batch() -> usize {
    8
}

/// What a stage runs for each of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Each {
    /// The rows of an output; the element's value is `each`.
    Rows {
        /// The output.
        of: String,
        /// Maximum number of rows; the first ones are used.
        #[serde(default = "default_most")]
        most: usize,
    },
    /// Rectangles that an output lists as left, top, right and bottom, in pixels of the cropped
    /// picture.
    Boxes {
        /// The output.
        of: String,
        /// Output with a score for each.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scores: Option<String>,
        /// Minimum score.
        #[serde(default)]
        score_least: f32,
        /// Maximum number of rectangles; the best ones are used.
        #[serde(default = "default_most")]
        most: usize,
    },
    /// Connected regions of a map of scores, as minimum-area rectangles, in reading order.
    Regions {
        /// The output with the map, which covers the whole picture.
        map: String,
        /// Score from which a cell belongs to a region.
        #[serde(default = "default_threshold")]
        threshold: f32,
        /// Minimum mean score of a region.
        #[serde(default = "default_score")]
        score_least: f32,
        /// How far rectangles are extended, in units of area over perimeter.
        #[serde(default = "default_grow")]
        grow: f32,
        /// Maximum number of regions; the best ones are used.
        #[serde(default = "default_most")]
        most: usize,
    },
}

fn default_most() -> usize {
    256
}

fn default_threshold() -> f32 {
    0.3
}

fn default_score() -> f32 {
    0.5
}

fn default_grow() -> f32 {
    1.6
}

/// The source of an input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Feed {
    /// A value: an input of the query, `STAGE.OUTPUT`, or `each`.
    Value(String),
    /// A picture, cropped and resized.
    Picture(PictureFeed),
}

/// A picture as a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PictureFeed {
    /// The query's input that holds the picture.
    pub of: String,
    /// Whether only the element's rectangle is used.
    #[serde(default)]
    pub crop: bool,
    /// The size to resize to.
    pub size: Size,
    /// Subtracted per channel, in 0..255.
    #[serde(default = "default_mean")]
    pub mean: Vec<f32>,
    /// Divides per channel, in 0..255.
    #[serde(default = "default_std")]
    pub std: Vec<f32>,
    /// Order of the colours.
    #[serde(default = "default_channels")]
    pub channels: ChannelOrder,
    /// Order of the dimensions.
    #[serde(default = "default_layout")]
    pub layout: ImageLayout,
}

fn default_mean() -> Vec<f32> {
    vec![0.0]
}

fn default_std() -> Vec<f32> {
    vec![255.0]
}

fn default_channels() -> ChannelOrder {
    ChannelOrder::Rgb
}

fn default_layout() -> ImageLayout {
    ImageLayout::Nchw
}

/// The size a picture gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Size {
    /// A fixed size.
    Exact {
        /// Pixels.
        width: u32,
        /// Pixels.
        height: u32,
    },
    /// The picture's own size, within limits and rounded.
    Whole {
        /// Minimum pixels of the shorter edge.
        #[serde(default)]
        short_least: u32,
        /// Maximum pixels of the longer edge; takes precedence over the minimum.
        long_most: u32,
        /// Edges are multiples of this.
        #[serde(default = "one")]
        multiple: u32,
    },
    /// A text line of this height. Its width is padded with zeros, so that lines of similar length
    /// share a batch.
    Line {
        /// Pixels.
        height: u32,
        /// Widths are multiples of this.
        width_step: u32,
        /// Minimum width.
        #[serde(default)]
        width_least: u32,
        /// Maximum width; longer lines are squeezed.
        width_most: u32,
    },
}

fn one() -> u32 {
    1
}

/// Why a query is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct SpecError(pub String);

fn refuse<T>(why: impl Into<String>) -> Result<T, SpecError> {
    Err(SpecError(why.into()))
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reference<'a> {
    /// An input of the query.
    Input(&'a str),
    /// An output of a stage.
    Output(usize, &'a str),
    /// The value of the element itself.
    Each,
}

/// A valid query, with derived data.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// The query.
    pub spec: QuerySpec,
    /// Stages whose outputs each stage reads.
    pub parents: Vec<BTreeSet<usize>>,
    /// Stages with `each` that determine the number of a stage's requests, outermost first.
    pub chains: Vec<Vec<usize>>,
    /// Inputs of the query.
    pub inputs: BTreeSet<String>,
}

impl QuerySpec {
    /// Parses a query: JSON where the text begins with a brace, else TOML.
    pub fn read(text: &str) -> Result<QuerySpec, SpecError> {
        let json = text.trim_start().starts_with('{');
        let read = match json {
            true => serde_json::from_str(text).map_err(|error| error.to_string()),
            false => toml::from_str(text).map_err(|error| error.to_string()),
        };
        read.map_err(|why| SpecError(format!("the query cannot be read: {}", why.trim_end())))
    }

    /// Resolves `name` for stage `stage`.
    pub fn reference<'a>(&self, stage: usize, name: &'a str) -> Result<Reference<'a>, SpecError> {
        if name == "each" {
            return Ok(Reference::Each);
        }
        let Some((from, output)) = name.split_once('.') else { return Ok(Reference::Input(name)) };
        let before = self.stages.iter().take(stage).position(|other| other.name == from);
        match before {
            Some(index) if !output.is_empty() => Ok(Reference::Output(index, output)),
            _ => refuse(format!("'{name}' is not an output of an earlier stage")),
        }
    }

    /// Checks everything that does not depend on the models.
    pub fn check(self) -> Result<Checked, SpecError> {
        if !(self.slo_ms.is_finite() && (0.1..=1e7).contains(&self.slo_ms)) {
            return refuse(format!("slo_ms = {} is out of range", self.slo_ms));
        }
        if self.stages.is_empty() || self.stages.len() > STAGES_MAX {
            return refuse(format!("a query has 1 to {STAGES_MAX} stages"));
        }
        let mut checked = Checked {
            parents: Vec::new(),
            chains: Vec::new(),
            inputs: BTreeSet::new(),
            spec: self.clone(),
        };
        for (index, stage) in self.stages.iter().enumerate() {
            check_stage(stage)?;
            if self.stages[..index].iter().any(|other| other.name == stage.name) {
                return refuse(format!("two stages are called '{}'", stage.name));
            }
            checked
                .add(index)
                .map_err(|SpecError(why)| SpecError(format!("stage '{}': {why}", stage.name)))?;
        }
        if self.output.is_empty() || self.output.len() > STAGES_MAX * 8 {
            return refuse("[output] names the outputs: NAME = \"STAGE.OUTPUT\"");
        }
        for (name, from) in &self.output {
            match self.reference(self.stages.len(), from) {
                Ok(Reference::Output(..)) => {}
                _ => {
                    return refuse(format!(
                        "output '{name}': '{from}' is not an output of a stage"
                    ));
                }
            }
        }
        Ok(checked)
    }
}

fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    !name.is_empty() && name.len() <= 64 && name.chars().all(plain)
}

fn check_stage(stage: &StageSpec) -> Result<(), SpecError> {
    let name = &stage.name;
    if !is_name(name) || name == "each" {
        return refuse(format!("'{name}' is not a stage name: use letters, digits, _ and -"));
    }
    let bad = |why: String| refuse(format!("stage '{name}': {why}"));
    if stage.model.is_empty() || stage.inputs.is_empty() {
        return bad("it needs a model and inputs".to_string());
    }
    if !(1..=ELEMENTS_MAX).contains(&stage.batch) {
        return bad(format!("batch = {} is not in 1..{ELEMENTS_MAX}", stage.batch));
    }
    let most = match &stage.each {
        None => 1,
        Some(Each::Rows { most, .. } | Each::Boxes { most, .. } | Each::Regions { most, .. }) => {
            *most
        }
    };
    if !(1..=ELEMENTS_MAX).contains(&most) {
        return bad(format!("most = {most} is not in 1..{ELEMENTS_MAX}"));
    }
    if stage.fan_out.is_some_and(|fan_out| !(0.0..=1e4).contains(&fan_out)) {
        return bad("fan_out is not in 0..10000".to_string());
    }
    for feed in stage.inputs.values() {
        if let Feed::Picture(picture) = feed {
            check_picture(picture, stage).or_else(bad)?;
        }
    }
    if let Some(score) = stage.turn_below {
        let is_crop = |feed: &Feed| matches!(feed, Feed::Picture(picture) if picture.crop);
        if stage.text.is_none() || !stage.inputs.values().any(is_crop) {
            return bad("turn_below needs text, and a picture with crop".to_string());
        }
        if !(0.0..=1.0).contains(&score) {
            return bad(format!("turn_below = {score} is not in 0..1"));
        }
    }
    Ok(())
}

fn check_picture(picture: &PictureFeed, stage: &StageSpec) -> Result<(), String> {
    let channels = if picture.channels == ChannelOrder::Gray { 1 } else { 3 };
    for values in [&picture.mean, &picture.std] {
        let finite = values.iter().all(|value| value.is_finite());
        if !finite || (values.len() != 1 && values.len() != channels) {
            return Err("mean and std have one value, or one per channel".to_string());
        }
    }
    if picture.std.contains(&0.0) {
        return Err("std must not be 0".to_string());
    }
    let cuts = matches!(stage.each, Some(Each::Boxes { .. } | Each::Regions { .. }));
    if picture.crop && !cuts {
        return Err("crop needs each.boxes or each.regions".to_string());
    }
    let edge = |pixels: u32| (1..=EDGE_MAX).contains(&pixels);
    let fine = match picture.size {
        Size::Exact { width, height } => edge(width) && edge(height),
        Size::Whole { short_least, long_most, multiple } => {
            edge(long_most) && edge(multiple) && multiple <= long_most && short_least <= long_most
        }
        Size::Line { height, width_step, width_least, width_most } => {
            edge(height) && edge(width_step) && edge(width_most) && width_least <= width_most
        }
    };
    if fine { Ok(()) } else { Err(format!("sizes are 1 to {EDGE_MAX} pixels")) }
}

impl Checked {
    /// Adds the data derived from stage `index`, which reads only from stages before it.
    fn add(&mut self, index: usize) -> Result<(), SpecError> {
        let stage = self.spec.stages[index].clone();
        let mut names: Vec<&str> = Vec::new();
        match &stage.each {
            None => {}
            Some(Each::Rows { of, .. }) => names.push(of),
            Some(Each::Boxes { of, scores, .. }) => {
                names.push(of);
                names.extend(scores.as_deref());
            }
            Some(Each::Regions { map, .. }) => names.push(map),
        }
        let fans = names.len();
        for feed in stage.inputs.values() {
            names.push(match feed {
                Feed::Value(name) => name,
                Feed::Picture(picture) => &picture.of,
            });
        }
        let (mut parents, mut chain) = (BTreeSet::new(), Vec::new());
        for (position, name) in names.into_iter().enumerate() {
            match self.spec.reference(index, name)? {
                Reference::Output(from, _) => {
                    parents.insert(from);
                    chain = self.longer(chain, &self.chains[from])?;
                }
                Reference::Input(_) if position < fans => {
                    return refuse(format!("'{name}' is not an output of a stage"));
                }
                Reference::Input(name) if is_name(name) => {
                    self.inputs.insert(name.to_string());
                }
                Reference::Input(name) => return refuse(format!("'{name}' is no name")),
                Reference::Each if !matches!(stage.each, Some(Each::Rows { .. })) => {
                    return refuse("'each' is a value only with each.rows");
                }
                Reference::Each => {}
            }
        }
        if stage.each.is_some() {
            chain.push(index);
        }
        self.parents.push(parents);
        self.chains.push(chain);
        Ok(())
    }

    /// The longer of two chains, of which one must continue the other: values of unrelated fan-outs
    /// have no common order.
    fn longer(&self, one: Vec<usize>, other: &[usize]) -> Result<Vec<usize>, SpecError> {
        match (one.starts_with(other), other.starts_with(&one)) {
            (true, _) => Ok(one),
            (_, true) => Ok(other.to_vec()),
            _ => refuse("it reads from two stages with unrelated fan-outs"),
        }
    }

    /// Stages that read from `stage`.
    pub fn next(&self, stage: usize) -> Vec<usize> {
        (0..self.parents.len()).filter(|&other| self.parents[other].contains(&stage)).collect()
    }

    /// Outputs of `stage` that are needed from its model.
    pub fn needed_outputs(&self, stage: usize) -> BTreeSet<String> {
        let spec = &self.spec.stages[stage];
        let own = ["text", "score", "region"];
        let mut needed: BTreeSet<String> = spec.text.iter().cloned().collect();
        let mut names: Vec<&String> = self.spec.output.values().collect();
        for later in &self.spec.stages[stage + 1..] {
            match &later.each {
                None => {}
                Some(Each::Rows { of, .. }) => names.push(of),
                Some(Each::Boxes { of, scores, .. }) => {
                    names.push(of);
                    names.extend(scores);
                }
                Some(Each::Regions { map, .. }) => names.push(map),
            }
            for feed in later.inputs.values() {
                if let Feed::Value(name) = feed {
                    names.push(name);
                }
            }
        }
        for name in names {
            if let Some((from, output)) = name.split_once('.')
                && from == spec.name
                && !(own.contains(&output) && (spec.text.is_some() || spec.each.is_some()))
            {
                needed.insert(output.to_string());
            }
        }
        needed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) const OCR: &str = r#"
        slo_ms = 2000
        [[stage]]
        name = "find"
        model = "det"
        inputs.x.picture = { of = "image", size.whole = { long_most = 960, multiple = 32 } }
        [[stage]]
        name = "read"
        model = "rec"
        fan_out = 10
        text = "scores"
        each.regions = { map = "find.map" }
        [stage.inputs.x.picture]
        of = "image"
        crop = true
        size.line = { height = 48, width_step = 160, width_most = 3200 }
        [output]
        text = "read.text"
        boxes = "read.region"
    "#;

    #[test]
    fn toml_and_json_are_equivalent() {
        let spec = QuerySpec::read(OCR).unwrap();
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(QuerySpec::read(&json).unwrap(), spec);
        let checked = spec.check().unwrap();
        assert_eq!(checked.parents[1], [0].into());
        assert_eq!(checked.chains, [vec![], vec![1]]);
        assert_eq!(checked.inputs, ["image".to_string()].into());
        assert_eq!(checked.needed_outputs(0), ["map".to_string()].into());
        assert_eq!(checked.needed_outputs(1), ["scores".to_string()].into());
    }

    #[test]
    fn reports_invalid_queries() {
        let error = |from: &str, to: &str| {
            assert!(OCR.contains(from), "{from}");
            let spec = QuerySpec::read(&OCR.replace(from, to));
            spec.and_then(QuerySpec::check).unwrap_err().to_string()
        };
        assert!(error("find.map", "find").contains("not an output of a stage"));
        assert!(error("find.map", "lost.map").contains("earlier stage"));
        assert!(error("name = \"read\"", "name = \"find\"").contains("two stages"));
        assert!(error("slo_ms = 2000", "slo_ms = -1").contains("out of range"));
        assert!(error("height = 48", "height = 0").contains("pixels"));
        assert!(error("read.text", "text").contains("not an output"));
        assert!(error("fan_out = 10", "fan_aut = 10").contains("fan_aut"));
        assert!(error("each.regions = { map = \"find.map\" }", "batch = 1").contains("crop needs"));
        assert!(error("fan_out = 10", "turn_below = 1.5").contains("is not in 0..1"));
        assert!(error("text = \"scores\"", "turn_below = 0.9").contains("turn_below needs text"));
        assert!(QuerySpec::read("{").is_err() && QuerySpec::read("").is_err());
        let turned = OCR.replace("fan_out = 10", "turn_below = 0.9");
        assert!(QuerySpec::read(&turned).and_then(QuerySpec::check).is_ok());
    }

    #[test]
    fn rejects_values_of_unrelated_fan_outs() {
        let text = r#"
            slo_ms = 10
            [[stage]]
            name = "a"
            model = "a"
            inputs.x.value = "x"
            [[stage]]
            name = "b"
            model = "b"
            each.rows = { of = "a.rows" }
            inputs.x.value = "each"
            [[stage]]
            name = "c"
            model = "c"
            each.rows = { of = "a.rows" }
            inputs.x.value = "each"
            [[stage]]
            name = "d"
            model = "d"
            inputs = { x.value = "b.y", z.value = "c.y" }
            [output]
            y = "d.y"
        "#;
        let error = QuerySpec::read(text).unwrap().check().unwrap_err();
        assert!(error.to_string().contains("unrelated fan-outs"), "{error}");
        let joined = text.replace("c.y", "a.y");
        let checked = QuerySpec::read(&joined).unwrap().check().unwrap();
        assert_eq!(checked.chains[3], [1]);
    }
}
