//! Offers of GPUs: kinds with a price, a power and a stock.

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::MixObjective;
use crate::error::PlanError;
use crate::gpu::GpuKind;
use crate::toml_file::{in_range, name, read, wrong};

const PRICES: (f64, f64) = (0.0, 1e9);
const WATTS: (f64, f64) = (0.001, 1e6);

/// GPUs of one kind at one price: a lease, a spot price, or owned ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuOffer {
    /// Its name, such as `lease`.
    pub name: String,
    /// Price of a GPU for an hour.
    pub price: f64,
    /// Power of a GPU under load; 0 if nobody said, which only plans for energy need.
    pub watts: f64,
    /// How many there are; `None` for any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StockFile {
    #[serde(default)]
    offer: Vec<Spanned<OfferEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfferEntry {
    gpu: Spanned<String>,
    name: Option<Spanned<String>>,
    price: Spanned<f64>,
    watts: Option<Spanned<f64>>,
    count: Option<Spanned<u32>>,
}

/// Reads `[[offer]]` tables with `gpu` and `price` and, where wanted, `name`, `watts` and `count`.
/// `find` knows the kinds. Offers of one kind are together, in the order of the file. Every offer
/// needs `watts` if energy is the objective.
pub fn offers_from_toml(
    text: &str,
    objective: MixObjective,
    find: impl Fn(&str) -> Result<&'static GpuKind, PlanError>,
) -> Result<Vec<(&'static GpuKind, Vec<GpuOffer>)>, PlanError> {
    let file: StockFile = read(text)?;
    let mut kinds: Vec<(&'static GpuKind, Vec<GpuOffer>)> = Vec::new();
    for spanned in &file.offer {
        let entry = spanned.get_ref();
        let found = find(entry.gpu.get_ref());
        let gpu = found.map_err(|error| wrong(text, &entry.gpu, format!("gpu: {error}")))?;
        if let Some(count) = entry.count.as_ref().filter(|count| *count.get_ref() == 0) {
            return Err(wrong(text, count, "count 0 is no offer".to_string()));
        }
        let offer = GpuOffer {
            name: match &entry.name {
                Some(own) => name(text, "name", own)?,
                None => gpu.name.to_string(),
            },
            price: in_range(text, "price", &entry.price, PRICES)?,
            watts: match &entry.watts {
                Some(watts) => in_range(text, "watts", watts, WATTS)?,
                None if objective == MixObjective::Energy => {
                    let what = format!("the offer of {} has no watts, and energy is", gpu.name);
                    return Err(wrong(text, spanned, format!("{what} what the plan keeps small")));
                }
                None => 0.0,
            },
            count: entry.count.as_ref().map(|count| *count.get_ref() as usize),
        };
        match kinds.iter_mut().find(|(kind, _)| std::ptr::eq(*kind, gpu)) {
            Some((_, offers)) => offers.push(offer),
            None => kinds.push((gpu, vec![offer])),
        }
    }
    if kinds.is_empty() {
        let what = "there are no [[offer]] tables".to_string();
        return Err(PlanError::BadFile { line: 1, what });
    }
    Ok(kinds)
}
