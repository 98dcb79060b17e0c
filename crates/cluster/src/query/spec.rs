//! A query as a user writes it, in TOML or JSON: models as stages, what feeds them, and one objective.

use std::collections::{BTreeMap, BTreeSet};

use model::config::{ChannelOrder, Class, ImageLayout};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The most stages of a query.
pub const STAGES_MAX: usize = 32;
/// The most requests that one question may make of a stage.
pub const ELEMENTS_MAX: usize = 1024;
/// The largest edge of a picture on its way into a model.
const EDGE_MAX: u32 = 8192;

/// A query.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuerySpec {
    /// Milliseconds from question to answer.
    pub slo_ms: f64,
    /// Class of requests that name none; each model's own otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
    /// The models, each after those it takes from.
    #[serde(rename = "stage")]
    pub stages: Vec<StageSpec>,
    /// What is answered: names, and where each comes from (`STAGE.OUTPUT`).
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
    /// How one answer of an earlier stage becomes several requests; without it, there is one request for each of
    /// what it takes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub each: Option<Each>,
    /// What the model's inputs get.
    pub inputs: BTreeMap<String, Feed>,
    /// The most requests of one question that travel together.
    #[serde(default = "default_batch")]
    pub batch: usize,
    /// Requests a question makes of this stage, as long as nobody has measured that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fan_out: Option<f64>,
    /// Output that is scores of characters over places: read as text under the model's labels, the first of which
    /// stands for no character. Adds the outputs `text` and `score`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

fn default_batch() -> usize {
    8
}

/// What a stage runs for each of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Each {
    /// The rows of an output; the stage's own value is `each`.
    Rows {
        /// The output.
        of: String,
        /// The most that are taken; the first ones.
        #[serde(default = "default_most")]
        most: usize,
    },
    /// Rectangles that an output lists, as left, top, right and bottom in pixels of the picture they are cut from.
    Boxes {
        /// The output.
        of: String,
        /// Output with a score for each.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scores: Option<String>,
        /// The least score.
        #[serde(default)]
        score_least: f32,
        /// The most that are taken; the best ones.
        #[serde(default = "default_most")]
        most: usize,
    },
    /// Regions that stand out in a map of scores, as tight rectangles of any angle, in reading order.
    Regions {
        /// The output with the map; it shows the whole picture.
        map: String,
        /// Score from which a place belongs to a region.
        #[serde(default = "default_threshold")]
        threshold: f32,
        /// Least mean score of a region.
        #[serde(default = "default_score")]
        score_least: f32,
        /// How far rectangles grow: times their area over their circumference.
        #[serde(default = "default_grow")]
        grow: f32,
        /// The most that are taken; the best ones.
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

/// What an input gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Feed {
    /// A value as it is: an input of the query, `STAGE.OUTPUT`, or `each`.
    Value(String),
    /// A picture, cut out and resized.
    Picture(PictureFeed),
}

/// A picture as a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PictureFeed {
    /// The input of the query with the picture.
    pub of: String,
    /// Whether only the stage's own rectangle is taken.
    #[serde(default)]
    pub crop: bool,
    /// How large it becomes.
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
    /// This one.
    Exact {
        /// Pixels.
        width: u32,
        /// Pixels.
        height: u32,
    },
    /// Its own, within limits and rounded.
    Whole {
        /// The shorter edge has so many pixels at least.
        #[serde(default)]
        short_least: u32,
        /// The longer edge has so many pixels at most; this goes before the other limit.
        long_most: u32,
        /// Edges are multiples of this.
        #[serde(default = "one")]
        multiple: u32,
    },
    /// A line of this height; the rest of its width is filled with zeros, so that lines of similar length travel together.
    Line {
        /// Pixels.
        height: u32,
        /// Widths are multiples of this.
        width_step: u32,
        /// The least width.
        #[serde(default)]
        width_least: u32,
        /// The most; longer lines are squeezed.
        width_most: u32,
    },
}

fn one() -> u32 {
    1
}

/// Why a query cannot be.
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
    /// The stage's own.
    Each,
}

/// A query that was checked, with what follows from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// The query.
    pub spec: QuerySpec,
    /// Stages that each stage takes from.
    pub parents: Vec<BTreeSet<usize>>,
    /// Stages, outermost first, whose `each` a stage's requests are counted by.
    pub chains: Vec<Vec<usize>>,
    /// Inputs of the query.
    pub inputs: BTreeSet<String>,
}

impl QuerySpec {
    /// Reads a query: JSON where the text begins with a brace, else TOML.
    pub fn read(text: &str) -> Result<QuerySpec, SpecError> {
        let json = text.trim_start().starts_with('{');
        let read = match json {
            true => serde_json::from_str(text).map_err(|error| error.to_string()),
            false => toml::from_str(text).map_err(|error| error.to_string()),
        };
        read.map_err(|why| SpecError(format!("the query cannot be read: {}", why.trim_end())))
    }

    /// Where `name` comes from, as stage `stage` sees it.
    pub fn reference<'a>(&self, stage: usize, name: &'a str) -> Result<Reference<'a>, SpecError> {
        if name == "each" {
            return Ok(Reference::Each);
        }
        let Some((from, output)) = name.split_once('.') else { return Ok(Reference::Input(name)) };
        let before = self.stages.iter().take(stage).position(|other| other.name == from);
        match before {
            Some(index) if !output.is_empty() => Ok(Reference::Output(index, output)),
            _ => refuse(format!("'{name}' is no output of a stage that comes before")),
        }
    }

    /// Checks everything that can be known without the models.
    pub fn check(self) -> Result<Checked, SpecError> {
        if !(self.slo_ms.is_finite() && (0.1..=1e7).contains(&self.slo_ms)) {
            return refuse(format!("slo_ms = {} is no objective", self.slo_ms));
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
            return refuse("[output] says what is answered: NAME = \"STAGE.OUTPUT\"");
        }
        for (name, from) in &self.output {
            match self.reference(self.stages.len(), from) {
                Ok(Reference::Output(..)) => {}
                _ => return refuse(format!("output '{name}': '{from}' is no output of a stage")),
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
        return refuse(format!("'{name}' is no name of a stage: letters, digits, _ and -"));
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
    /// Adds what follows from stage `index`, which takes only from stages before it.
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
                    return refuse(format!("'{name}' is no output of a stage"));
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

    /// The longer of two chains, of which one must continue the other: values of unrelated fan-outs have no common
    /// order.
    fn longer(&self, one: Vec<usize>, other: &[usize]) -> Result<Vec<usize>, SpecError> {
        match (one.starts_with(other), other.starts_with(&one)) {
            (true, _) => Ok(one),
            (_, true) => Ok(other.to_vec()),
            _ => refuse("it takes from two stages that fan out separately"),
        }
    }

    /// Stages that take from `stage`.
    pub fn next(&self, stage: usize) -> Vec<usize> {
        (0..self.parents.len()).filter(|&other| self.parents[other].contains(&stage)).collect()
    }

    /// Outputs of `stage` that somebody needs from its model.
    pub fn wanted(&self, stage: usize) -> BTreeSet<String> {
        let spec = &self.spec.stages[stage];
        let own = ["text", "score", "region"];
        let mut wanted: BTreeSet<String> = spec.text.iter().cloned().collect();
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
                wanted.insert(output.to_string());
            }
        }
        wanted
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
        inputs.x.picture = { of = "image", crop = true, size.line = { height = 48, width_step = 160, width_most = 3200 } }
        [output]
        text = "read.text"
        boxes = "read.region"
    "#;

    #[test]
    fn toml_and_json_say_the_same() {
        let spec = QuerySpec::read(OCR).unwrap();
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(QuerySpec::read(&json).unwrap(), spec);
        let checked = spec.check().unwrap();
        assert_eq!(checked.parents[1], [0].into());
        assert_eq!(checked.chains, [vec![], vec![1]]);
        assert_eq!(checked.inputs, ["image".to_string()].into());
        assert_eq!(checked.wanted(0), ["map".to_string()].into());
        assert_eq!(checked.wanted(1), ["scores".to_string()].into());
    }

    #[test]
    fn what_cannot_be_is_named() {
        let error = |from: &str, to: &str| {
            assert!(OCR.contains(from), "{from}");
            let spec = QuerySpec::read(&OCR.replace(from, to));
            spec.and_then(QuerySpec::check).unwrap_err().to_string()
        };
        assert!(error("find.map", "find").contains("no output of a stage"));
        assert!(error("find.map", "lost.map").contains("comes before"));
        assert!(error("name = \"read\"", "name = \"find\"").contains("two stages"));
        assert!(error("slo_ms = 2000", "slo_ms = -1").contains("no objective"));
        assert!(error("height = 48", "height = 0").contains("pixels"));
        assert!(error("read.text", "text").contains("no output"));
        assert!(error("fan_out = 10", "fan_aut = 10").contains("fan_aut"));
        assert!(error("each.regions = { map = \"find.map\" }", "batch = 1").contains("crop needs"));
        assert!(QuerySpec::read("{").is_err() && QuerySpec::read("").is_err());
    }

    #[test]
    fn separate_fan_outs_do_not_mix() {
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
        assert!(error.to_string().contains("fan out separately"), "{error}");
        let joined = text.replace("c.y", "a.y");
        let checked = QuerySpec::read(&joined).unwrap().check().unwrap();
        assert_eq!(checked.chains[3], [1]);
    }
}
