//! Which models the clients of a soak know of, and where each stands as far as they know.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Random;

/// Registered models in service at once.
pub(super) const REGISTERED_MOST: usize = 24;

/// Names of registered models that are not in service any more which are remembered.
const GONE_KEPT: usize = 64;

/// What a model answers like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The n-th network of the repository.
    Network(usize),
    /// The one that clients register.
    Registered,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    /// Somebody loads or unloads it.
    Changing,
    Loaded,
}

#[derive(Debug)]
struct Place {
    name: Arc<str>,
    origin: Origin,
    state: State,
}

/// A model by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) name: Arc<str>,
    pub(super) origin: Origin,
}

#[derive(Debug, Default)]
struct Places {
    all: Vec<Place>,
    gone: VecDeque<Arc<str>>,
    registered: u64,
    most_registered: usize,
}

/// All models.
#[derive(Debug, Default)]
pub(super) struct Roster {
    places: Mutex<Places>,
}

impl Roster {
    pub(super) fn new(networks: &[String]) -> Roster {
        let place = |(index, name): (usize, &String)| Place {
            name: name.as_str().into(),
            origin: Origin::Network(index),
            state: State::Absent,
        };
        let all = networks.iter().enumerate().map(place).collect();
        Roster { places: Mutex::new(Places { all, ..Places::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that is in service.
    pub(super) fn loaded(&self, random: &mut Random) -> Option<Named> {
        let places = self.lock();
        pick(&places.all, random, |place| place.state == State::Loaded)
            .map(|at| places.all[at].named())
    }

    /// A name that is not in service and will not be: of a model that was unloaded for good where there is one, and `false`,
    /// or one that never was, and `true`.
    pub(super) fn absent(&self, random: &mut Random) -> (Arc<str>, bool) {
        let places = self.lock();
        let never = places.gone.is_empty() || random.below(2) == 0;
        match never {
            true => (format!("nobody-{}", random.below(1_000)).into(), true),
            false => {
                let at = random.below(places.gone.len() as u64) as usize;
                (places.gone[at].clone(), false)
            }
        }
    }

    /// A network that is not in service and that the caller is to load, or else one that is, to be loaded again, and `false`.
    pub(super) fn begin_load(&self, random: &mut Random) -> Option<(Named, bool)> {
        let mut places = self.lock();
        if let Some(at) = pick(&places.all, random, |place| place.state == State::Absent) {
            places.all[at].state = State::Changing;
            return Some((places.all[at].named(), true));
        }
        let again = |place: &Place| place.is_network() && place.state == State::Loaded;
        pick(&places.all, random, again).map(|at| (places.all[at].named(), false))
    }

    /// One in service that the caller is to unload, rather one that was registered; never the last, which others ask.
    pub(super) fn begin_unload(&self, random: &mut Random) -> Option<Named> {
        let mut places = self.lock();
        if places.all.iter().filter(|place| place.state == State::Loaded).count() < 2 {
            return None;
        }
        let network = random.below(3) == 0;
        let wanted = |place: &Place| place.state == State::Loaded && place.is_network() == network;
        let at = pick(&places.all, random, wanted)
            .or_else(|| pick(&places.all, random, |place| place.state == State::Loaded))?;
        places.all[at].state = State::Changing;
        Some(places.all[at].named())
    }

    /// A new name to register under, or one in service that must be unloaded before there is room.
    pub(super) fn begin_register(&self) -> Result<Named, Option<Named>> {
        let mut places = self.lock();
        let registered = places.all.iter().filter(|place| !place.is_network()).count();
        if registered >= REGISTERED_MOST {
            let oldest =
                places.all.iter_mut().find(|p| !p.is_network() && p.state == State::Loaded);
            return Err(oldest.map(|place| {
                place.state = State::Changing;
                place.named()
            }));
        }
        places.registered += 1;
        places.most_registered = places.most_registered.max(registered + 1);
        let name: Arc<str> = format!("registered-{}", places.registered).into();
        let place = Place { name, origin: Origin::Registered, state: State::Changing };
        let named = place.named();
        places.all.push(place);
        Ok(named)
    }

    /// What was begun is over: the model is in service, or is not.
    pub(super) fn finish(&self, model: &Named, loaded: bool) {
        let mut places = self.lock();
        let Some(at) = places.all.iter().position(|place| place.name == model.name) else { return };
        match (loaded, model.origin) {
            (true, _) => places.all[at].state = State::Loaded,
            (false, Origin::Network(_)) => places.all[at].state = State::Absent,
            (false, Origin::Registered) => {
                let place = places.all.remove(at);
                places.gone.push_back(place.name);
                if places.gone.len() > GONE_KEPT {
                    places.gone.pop_front();
                }
            }
        }
    }

    /// All that is in service, for the caller to unload.
    pub(super) fn take_all(&self) -> Vec<Named> {
        let mut places = self.lock();
        let loaded = places.all.iter_mut().filter(|place| place.state == State::Loaded);
        loaded
            .map(|place| {
                place.state = State::Changing;
                place.named()
            })
            .collect()
    }

    /// The most registered models that were there at once.
    pub(super) fn most_registered(&self) -> usize {
        self.lock().most_registered
    }
}

impl Place {
    fn named(&self) -> Named {
        Named { name: self.name.clone(), origin: self.origin }
    }

    fn is_network(&self) -> bool {
        self.origin != Origin::Registered
    }
}

fn pick(all: &[Place], random: &mut Random, wanted: impl Fn(&Place) -> bool) -> Option<usize> {
    let count = all.iter().filter(|place| wanted(place)).count() as u64;
    let number = random.below(count.max(1)) as usize;
    all.iter().enumerate().filter(|(_, place)| wanted(place)).nth(number).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_come_and_go_within_their_bound() {
        let mut random = Random::new(5);
        let roster = Roster::new(&["a".to_string(), "b".to_string()]);
        assert_eq!(roster.loaded(&mut random), None);
        assert_eq!(roster.begin_unload(&mut random), None);
        assert!(roster.absent(&mut random).1, "nothing was unloaded yet");
        let (one, fresh) = roster.begin_load(&mut random).unwrap();
        let (other, _) = roster.begin_load(&mut random).unwrap();
        assert!(fresh && one != other);
        assert_eq!(roster.begin_load(&mut random), None, "both are on their way");
        roster.finish(&one, true);
        assert_eq!(roster.loaded(&mut random), Some(one.clone()));
        assert_eq!(roster.begin_unload(&mut random), None, "it is the last one");
        assert_eq!(roster.begin_load(&mut random), Some((one, false)));
        for _ in 0..REGISTERED_MOST {
            let named = roster.begin_register().unwrap();
            roster.finish(&named, true);
        }
        let first = roster.begin_register().unwrap_err().unwrap();
        assert_eq!(&*first.name, "registered-1");
        roster.finish(&first, false);
        assert_eq!(&*roster.begin_register().unwrap().name, "registered-25");
        assert_eq!(roster.most_registered(), REGISTERED_MOST);
        let gone = (0..100).map(|_| roster.absent(&mut random)).find(|(_, never)| !never);
        assert_eq!(&*gone.unwrap().0, "registered-1");
        let left = roster.take_all();
        assert_eq!(left.len(), 1 + 23, "one network, and those that are registered and ready");
        assert!(roster.take_all().is_empty());
    }
}
