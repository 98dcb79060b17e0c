//! A replica pool as named on the command line.

use std::str::FromStr;

use base::Nanos;

use super::kubernetes::WorkloadName;

/// Limits of the numbers in a text.
const REPLICAS_MAX: u32 = 100_000;
const PRICE_MAX: f64 = 1e9;
const SECONDS_MAX: u64 = 30 * 86_400;
const KIND_MAX: usize = 128;

/// A workload whose replicas are backends of one kind:
/// `deployment/NAME[,kind=K][,min=N][,max=N][,price=P][,cooldown=S][,zero-after=S]`. What is not
/// given is that of all pools.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSpec {
    /// The workload.
    pub workload: WorkloadName,
    /// The kind of device of its backends.
    pub kind: Option<String>,
    /// The fewest replicas.
    pub min: Option<u32>,
    /// The most replicas.
    pub max: Option<u32>,
    /// Price of a replica, in relation to those of other pools.
    pub price: Option<f64>,
    /// Minimum time between two changes.
    pub cooldown: Option<Nanos>,
    /// Time without a request after which the last replicas are removed.
    pub zero_after: Option<Nanos>,
}

fn seconds(key: &str, value: &str) -> Result<Nanos, String> {
    let seconds = value.parse::<u64>().ok().filter(|seconds| *seconds <= SECONDS_MAX);
    let seconds = seconds.ok_or_else(|| format!("{key}={value} is no number of seconds"))?;
    Ok(Nanos::from_millis(1000 * seconds))
}

fn replicas(key: &str, value: &str) -> Result<u32, String> {
    let count = value.parse::<u32>().ok().filter(|count| *count <= REPLICAS_MAX);
    count.ok_or_else(|| format!("{key}={value} is no number of replicas, from 0 to {REPLICAS_MAX}"))
}

fn price(value: &str) -> Result<f64, String> {
    let price = value.parse::<f64>().ok().filter(|price| (1e-9..=PRICE_MAX).contains(price));
    price.ok_or_else(|| format!("price={value} is no price above 0"))
}

fn kind(value: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    match !value.is_empty() && value.len() <= KIND_MAX && value.chars().all(is_plain) {
        true => Ok(value.to_string()),
        false => Err(format!("kind={value} is not made of letters, digits, _ . and -")),
    }
}

/// Sets a value that was not given before.
fn set<T>(slot: &mut Option<T>, key: &str, value: T) -> Result<(), String> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("{key} is given twice")),
    }
}

impl FromStr for PoolSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<PoolSpec, String> {
        let mut parts = text.split(',');
        let mut pool = PoolSpec {
            workload: parts.next().unwrap_or_default().parse()?,
            kind: None,
            min: None,
            max: None,
            price: None,
            cooldown: None,
            zero_after: None,
        };
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            match key {
                "kind" => set(&mut pool.kind, key, kind(value)?)?,
                "min" => set(&mut pool.min, key, replicas(key, value)?)?,
                "max" => set(&mut pool.max, key, replicas(key, value)?)?,
                "price" => set(&mut pool.price, key, price(value)?)?,
                "cooldown" => set(&mut pool.cooldown, key, seconds(key, value)?)?,
                "zero-after" => set(&mut pool.zero_after, key, seconds(key, value)?)?,
                _ => {
                    return Err(format!(
                        "'{key}' is none of kind, min, max, price, cooldown and zero-after"
                    ));
                }
            }
        }
        Ok(pool)
    }
}

/// Checks pools together: each is named once, and of several each names its kind.
///
/// # Errors
/// What is wrong.
pub fn check_pools(pools: &[PoolSpec]) -> Result<(), String> {
    if pools.len() > crate::record::scaling::POOLS_MAX {
        let most = crate::record::scaling::POOLS_MAX;
        return Err(format!("there are {} pools, more than {most}", pools.len()));
    }
    for (index, pool) in pools.iter().enumerate() {
        let name = &pool.workload.name;
        if pools[..index].iter().any(|other| other.workload == pool.workload) {
            return Err(format!("'{name}' is given twice"));
        }
        if pools.len() > 1 && pool.kind.is_none() {
            return Err(format!("'{name}' needs a kind: of several pools each names its own"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_workload_alone_and_one_with_everything() {
        let plain: PoolSpec = "deployment/atoll-backend".parse().unwrap();
        assert_eq!((plain.workload.name.as_str(), plain.kind), ("atoll-backend", None));
        let text = "sts/a,kind=a100,min=0,max=8,price=3.2,cooldown=10,zero-after=600";
        let pool: PoolSpec = text.parse().unwrap();
        assert_eq!((pool.kind.as_deref(), pool.min, pool.max), (Some("a100"), Some(0), Some(8)));
        assert_eq!((pool.price, pool.cooldown), (Some(3.2), Some(Nanos::from_millis(10_000))));
        assert_eq!(pool.zero_after, Some(Nanos::from_millis(600_000)));
    }

    #[test]
    fn refuses_what_makes_no_sense_and_says_why() {
        let cases = [
            ("a100", "neither deployment/NAME"),
            ("deployment/a,min=-1", "min=-1"),
            ("deployment/a,max=1000000", "max=1000000"),
            ("deployment/a,price=0", "price=0"),
            ("deployment/a,price=NaN", "price=NaN"),
            ("deployment/a,kind=", "kind="),
            ("deployment/a,kind=a/b", "kind=a/b"),
            ("deployment/a,min=1,min=2", "min is given twice"),
            ("deployment/a,size=3", "'size' is none of"),
            ("deployment/a,", "'' is none of"),
            ("deployment/a,cooldown=99999999999", "cooldown="),
        ];
        for (text, why) in cases {
            let error = text.parse::<PoolSpec>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn several_pools_have_names_and_kinds_of_their_own() {
        let check = |texts: &[&str]| {
            let pools: Vec<PoolSpec> = texts.iter().map(|text| text.parse().unwrap()).collect();
            check_pools(&pools)
        };
        assert!(check(&["deployment/a"]).is_ok());
        assert!(check(&["deployment/a,kind=x", "deployment/b,kind=x"]).is_ok());
        assert!(check(&["deployment/a,kind=x", "deployment/a,kind=y"]).is_err());
        assert!(check(&["deployment/a,kind=x", "deployment/b"]).is_err());
        assert!(check(&["deployment/a"; 17]).is_err());
    }
}
