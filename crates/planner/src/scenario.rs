//! The scenarios S1 to S6 of ParvaGPU (SC'24, table IV; the values are those of the authors'
//! repository).

use base::Random;

use crate::problem::Service;

/// The models, in the order of the rows below.
pub const MODELS: [&str; 11] = [
    "bert",
    "densenet121",
    "densenet169",
    "densenet201",
    "inceptionv3",
    "mobilenetv2",
    "resnet101",
    "resnet152",
    "resnet50",
    "vgg16",
    "vgg19",
];

const RATES: [[u32; 11]; 6] = [
    [19, 353, 0, 0, 460, 677, 0, 0, 829, 0, 354],
    [19, 353, 308, 276, 460, 677, 393, 281, 829, 410, 354],
    [46, 728, 633, 493, 1051, 1546, 760, 543, 1463, 780, 673],
    [69, 1091, 949, 739, 1576, 2318, 1140, 815, 2195, 1169, 1010],
    [843, 2228, 3507, 1513, 3815, 5009, 1874, 1340, 2796, 1773, 1531],
    [1264, 3342, 5260, 2269, 5722, 7513, 2811, 2010, 4196, 2659, 2296],
];

const LOOSE: [f64; 11] =
    [6434.0, 183.0, 216.5, 168.5, 418.5, 167.0, 211.5, 212.5, 204.5, 399.5, 396.5];
const MIDDLE: [f64; 11] =
    [4294.0, 126.0, 150.0, 119.0, 282.0, 113.0, 144.0, 146.0, 138.0, 227.0, 265.0];
const TIGHT: [f64; 11] = [2153.0, 69.0, 83.5, 69.5, 145.5, 59.0, 76.5, 79.5, 71.5, 114.5, 133.5];
const SLOS_MS: [&[f64; 11]; 6] = [&LOOSE, &LOOSE, &MIDDLE, &MIDDLE, &TIGHT, &LOOSE];

/// The services of scenario `number`, from 1 to 6; none for another number.
pub fn services(number: usize) -> Vec<Service> {
    let Some((rates, slos)) = number.checked_sub(1).and_then(|i| RATES.get(i).zip(SLOS_MS.get(i)))
    else {
        return Vec::new();
    };
    (0..MODELS.len())
        .filter(|&model| rates[model] > 0)
        .map(|model| Service {
            name: MODELS[model].to_string(),
            model: MODELS[model].to_string(),
            rate: f64::from(rates[model]),
            slo_ms: slos[model],
        })
        .collect()
}

/// `copies` of every service of a scenario, each under a name of its own.
pub fn services_times(number: usize, copies: usize) -> Vec<Service> {
    let one = services(number);
    let copy = |copy: usize| {
        one.iter().map(move |service| Service {
            name: format!("{}-{copy}", service.name),
            ..service.clone()
        })
    };
    (0..copies).flat_map(copy).collect()
}

/// `count` random services like those of S5: their models, rates from 0.2 to 1.3 times and SLOs
/// from 1 to 3 times theirs.
pub fn random_services(count: usize, random: &mut Random) -> Vec<Service> {
    let base = services(5);
    let one = |index| {
        let base = &base[random.below(base.len() as u64) as usize];
        Service {
            name: format!("{}-{index}", base.model),
            model: base.model.clone(),
            rate: base.rate * (0.2 + 1.1 * random.unit_f64()),
            slo_ms: base.slo_ms * (1.0 + 2.0 * random.unit_f64()),
        }
    };
    (0..count).map(one).collect()
}
