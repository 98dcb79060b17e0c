//! The models that the clients of a soak know, and their states.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Random;

/// Max registered models.
pub(super) const REGISTERED_MAX: usize = 24;

/// Number of unloaded names that are remembered.
const UNLOADED_MAX: usize = 64;

/// Where a model comes from, which determines its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelSource {
    /// The n-th network of the repository.
    Network(usize),
    /// The model that clients register.
    Registered,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadState {
    Absent,
    /// A client loads or unloads it.
    Changing,
    Loaded,
}

#[derive(Debug)]
struct ModelEntry {
    name: Arc<str>,
    source: ModelSource,
    state: LoadState,
}

/// A model by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelName {
    pub(super) name: Arc<str>,
    pub(super) source: ModelSource,
}

#[derive(Debug, Default)]
struct ModelEntries {
    all: Vec<ModelEntry>,
    gone: VecDeque<Arc<str>>,
    registered: u64,
    most_registered: usize,
}

/// The states of all models.
#[derive(Debug, Default)]
pub(super) struct ModelStates {
    entries: Mutex<ModelEntries>,
}

impl ModelStates {
    pub(super) fn new(networks: &[String]) -> ModelStates {
        let entry = |(index, name): (usize, &String)| ModelEntry {
            name: name.as_str().into(),
            source: ModelSource::Network(index),
            state: LoadState::Absent,
        };
        let all = networks.iter().enumerate().map(entry).collect();
        ModelStates { entries: Mutex::new(ModelEntries { all, ..ModelEntries::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, ModelEntries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A loaded model.
    pub(super) fn loaded(&self, random: &mut Random) -> Option<ModelName> {
        let entries = self.lock();
        pick(&entries.all, random, |entry| entry.state == LoadState::Loaded)
            .map(|at| entries.all[at].named())
    }

    /// A name that is not loaded and will not be: an unloaded one and `false`, or one that never
    /// existed and `true`.
    pub(super) fn absent(&self, random: &mut Random) -> (Arc<str>, bool) {
        let entries = self.lock();
        let never = entries.gone.is_empty() || random.below(2) == 0;
        match never {
            true => (format!("unknown-{}", random.below(1_000)).into(), true),
            false => {
                let at = random.below(entries.gone.len() as u64) as usize;
                (entries.gone[at].clone(), false)
            }
        }
    }

    /// A network that the caller must load, and `true`; or a loaded one to load again, and `false`.
    pub(super) fn begin_load(&self, random: &mut Random) -> Option<(ModelName, bool)> {
        let mut entries = self.lock();
        if let Some(at) = pick(&entries.all, random, |entry| entry.state == LoadState::Absent) {
            entries.all[at].state = LoadState::Changing;
            return Some((entries.all[at].named(), true));
        }
        let again = |entry: &ModelEntry| entry.is_network() && entry.state == LoadState::Loaded;
        pick(&entries.all, random, again).map(|at| (entries.all[at].named(), false))
    }

    /// A loaded model that the caller must unload, preferably a registered one; never the last,
    /// which other clients need.
    pub(super) fn begin_unload(&self, random: &mut Random) -> Option<ModelName> {
        let mut entries = self.lock();
        if entries.all.iter().filter(|entry| entry.state == LoadState::Loaded).count() < 2 {
            return None;
        }
        let network = random.below(3) == 0;
        let wanted =
            |entry: &ModelEntry| entry.state == LoadState::Loaded && entry.is_network() == network;
        let at = pick(&entries.all, random, wanted)
            .or_else(|| pick(&entries.all, random, |entry| entry.state == LoadState::Loaded))?;
        entries.all[at].state = LoadState::Changing;
        Some(entries.all[at].named())
    }

    /// A new name to register; or, if there are too many, a model that the caller must unload
    /// first.
    pub(super) fn begin_register(&self) -> Result<ModelName, Option<ModelName>> {
        let mut entries = self.lock();
        let registered = entries.all.iter().filter(|entry| !entry.is_network()).count();
        if registered >= REGISTERED_MAX {
            let oldest =
                entries.all.iter_mut().find(|p| !p.is_network() && p.state == LoadState::Loaded);
            return Err(oldest.map(|entry| {
                entry.state = LoadState::Changing;
                entry.named()
            }));
        }
        entries.registered += 1;
        entries.most_registered = entries.most_registered.max(registered + 1);
        let name: Arc<str> = format!("registered-{}", entries.registered).into();
        let entry =
            ModelEntry { name, source: ModelSource::Registered, state: LoadState::Changing };
        let named = entry.named();
        entries.all.push(entry);
        Ok(named)
    }

    /// Ends a load or unload: the model is now loaded or not.
    pub(super) fn finish(&self, model: &ModelName, loaded: bool) {
        let mut entries = self.lock();
        let Some(at) = entries.all.iter().position(|entry| entry.name == model.name) else {
            return;
        };
        match (loaded, model.source) {
            (true, _) => entries.all[at].state = LoadState::Loaded,
            (false, ModelSource::Network(_)) => entries.all[at].state = LoadState::Absent,
            (false, ModelSource::Registered) => {
                let entry = entries.all.remove(at);
                entries.gone.push_back(entry.name);
                if entries.gone.len() > UNLOADED_MAX {
                    entries.gone.pop_front();
                }
            }
        }
    }

    /// All loaded models, which the caller must unload.
    pub(super) fn take_all(&self) -> Vec<ModelName> {
        let mut entries = self.lock();
        let loaded = entries.all.iter_mut().filter(|entry| entry.state == LoadState::Loaded);
        loaded
            .map(|entry| {
                entry.state = LoadState::Changing;
                entry.named()
            })
            .collect()
    }

    /// The maximum number of registered models so far.
    pub(super) fn most_registered(&self) -> usize {
        self.lock().most_registered
    }
}

impl ModelEntry {
    fn named(&self) -> ModelName {
        ModelName { name: self.name.clone(), source: self.source }
    }

    fn is_network(&self) -> bool {
        self.source != ModelSource::Registered
    }
}

fn pick(
    all: &[ModelEntry],
    random: &mut Random,
    wanted: impl Fn(&ModelEntry) -> bool,
) -> Option<usize> {
    let count = all.iter().filter(|entry| wanted(entry)).count() as u64;
    let number = random.below(count.max(1)) as usize;
    all.iter().enumerate().filter(|(_, entry)| wanted(entry)).nth(number).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_loaded_and_unloaded_within_limits() {
        let mut random = Random::new(5);
        let states = ModelStates::new(&["a".to_string(), "b".to_string()]);
        assert_eq!(states.loaded(&mut random), None);
        assert_eq!(states.begin_unload(&mut random), None);
        assert!(states.absent(&mut random).1, "nothing was unloaded yet");
        let (one, fresh) = states.begin_load(&mut random).unwrap();
        let (other, _) = states.begin_load(&mut random).unwrap();
        assert!(fresh && one != other);
        assert_eq!(states.begin_load(&mut random), None, "both are on their way");
        states.finish(&one, true);
        assert_eq!(states.loaded(&mut random), Some(one.clone()));
        assert_eq!(states.begin_unload(&mut random), None, "it is the last one");
        assert_eq!(states.begin_load(&mut random), Some((one, false)));
        for _ in 0..REGISTERED_MAX {
            let named = states.begin_register().unwrap();
            states.finish(&named, true);
        }
        let first = states.begin_register().unwrap_err().unwrap();
        assert_eq!(&*first.name, "registered-1");
        states.finish(&first, false);
        assert_eq!(&*states.begin_register().unwrap().name, "registered-25");
        assert_eq!(states.most_registered(), REGISTERED_MAX);
        let gone = (0..100).map(|_| states.absent(&mut random)).find(|(_, never)| !never);
        assert_eq!(&*gone.unwrap().0, "registered-1");
        let left = states.take_all();
        assert_eq!(left.len(), 1 + 23, "one network, and those that are registered and ready");
        assert!(states.take_all().is_empty());
    }
}
