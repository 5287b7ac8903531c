//! Slabs: reference-counted pieces of KV memory, each in device or host memory.
//!
//! A slab holds the same 256 cells of several layers. It belongs to as many sequences as count it, is written only by a sole owner, and
//! moves between device and host memory without changing what it holds.

use crate::backend::Backend;
use crate::error::Error;

/// A slab of a [`Store`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Id(pub(super) u32);

/// What a slab held at some time: differs from any other slab's, and from its own after a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version(pub(super) u64);

#[derive(Debug)]
enum Memory<B: Backend> {
    Device(B::Slab),
    Host(B::HostSlab),
    /// Nobody's.
    Free,
}

#[derive(Debug)]
struct Entry<B: Backend> {
    owners: u32,
    version: u64,
    memory: Memory<B>,
}

/// Slabs of one size.
#[derive(Debug)]
pub(super) struct Store<B: Backend> {
    slab_bytes: usize,
    entries: Vec<Entry<B>>,
    free: Vec<Id>,
    /// Memory of slabs that were given back: taking it from the system anew costs more than to keep it.
    spare: Vec<B::Slab>,
    spare_host: Vec<B::HostSlab>,
    /// Slabs in device memory, and in host memory.
    device: usize,
    host: usize,
    device_max: usize,
    host_max: usize,
    version: u64,
    /// Slabs that were given or taken memory so far.
    moves: u64,
    /// Slabs that the device has memory for.
    #[cfg(test)]
    pub(super) memory_slabs: usize,
}

impl<B: Backend> Store<B> {
    pub(super) fn new(slab_bytes: usize, device_max: usize, host_max: usize) -> Self {
        Self {
            slab_bytes,
            entries: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            spare_host: Vec::new(),
            device: 0,
            host: 0,
            device_max,
            host_max,
            version: 0,
            moves: 0,
            #[cfg(test)]
            memory_slabs: usize::MAX,
        }
    }

    pub(super) fn slab_bytes(&self) -> usize {
        self.slab_bytes
    }

    /// Slabs that device memory has room for beside those that are there.
    pub(super) fn device_room(&self) -> usize {
        self.device_max.saturating_sub(self.device)
    }

    /// Whether there are more than may be since the last change of it.
    pub(super) fn is_over(&self) -> bool {
        self.device > self.device_max
    }

    pub(super) fn set_device_max(&mut self, slabs: usize) {
        self.device_max = slabs;
    }

    pub(super) fn device_max(&self) -> usize {
        self.device_max
    }

    pub(super) fn host_max(&self) -> usize {
        self.host_max
    }

    pub(super) fn host_room(&self) -> usize {
        self.host_max - self.host
    }

    /// Grows whenever a slab is given memory or loses it: as long as it does not, every slab is where it was.
    pub(super) fn moves(&self) -> u64 {
        self.moves
    }

    /// Slabs in host memory.
    pub(super) fn in_host(&self) -> usize {
        self.host
    }

    /// Slabs in device memory.
    pub(super) fn in_device(&self) -> usize {
        self.device
    }

    fn entry(&self, id: Id) -> &Entry<B> {
        &self.entries[id.0 as usize]
    }

    pub(super) fn is_on_device(&self, id: Id) -> bool {
        matches!(self.entry(id).memory, Memory::Device(_))
    }

    pub(super) fn is_shared(&self, id: Id) -> bool {
        self.entry(id).owners > 1
    }

    /// Whether a slab is somebody's.
    #[cfg(test)]
    pub(super) fn is_owned(&self, id: Id) -> bool {
        self.entry(id).owners > 0
    }

    pub(super) fn version(&self, id: Id) -> Version {
        Version(self.entry(id).version)
    }

    /// The slab, if it is in device memory.
    pub(super) fn device(&self, id: Id) -> Option<&B::Slab> {
        match &self.entry(id).memory {
            Memory::Device(slab) => Some(slab),
            _ => None,
        }
    }

    /// The slab, if it is in host memory.
    pub(super) fn host(&self, id: Id) -> Option<&B::HostSlab> {
        match &self.entry(id).memory {
            Memory::Host(slab) => Some(slab),
            _ => None,
        }
    }

    /// The slab, to be written: it must be in device memory and not shared.
    pub(super) fn device_mut(&mut self, id: Id) -> &mut B::Slab {
        self.version += 1;
        let entry = &mut self.entries[id.0 as usize];
        assert_eq!(entry.owners, 1, "only a sole owner writes");
        entry.version = self.version;
        match &mut entry.memory {
            Memory::Device(slab) => slab,
            _ => unreachable!("only slabs in device memory are written"),
        }
    }

    /// Several, in the order of `ids`, each of which is there once.
    pub(super) fn device_each_mut(&mut self, ids: &[Id]) -> Vec<&mut B::Slab> {
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_unstable_by_key(|&i| ids[i].0);
        let mut slabs: Vec<Option<&mut B::Slab>> = ids.iter().map(|_| None).collect();
        let (mut rest, mut before) = (&mut self.entries[..], 0);
        for i in order {
            self.version += 1;
            let at = ids[i].0 as usize;
            let (_, from) = std::mem::take(&mut rest).split_at_mut(at - before);
            let (entry, behind) = from.split_first_mut().expect("a slab of this store");
            (rest, before) = (behind, at + 1);
            assert_eq!(entry.owners, 1, "only a sole owner writes");
            entry.version = self.version;
            slabs[i] = match &mut entry.memory {
                Memory::Device(slab) => Some(slab),
                _ => unreachable!("only slabs in device memory are written"),
            };
        }
        slabs.into_iter().flatten().collect()
    }

    /// A new slab in device memory, which has room, with one owner. What it holds is left over from another.
    pub(super) fn add(&mut self, backend: &B) -> Result<Id, Error> {
        let slab = self.take_device(backend)?;
        self.device += 1;
        self.version += 1;
        let entry = Entry {
            owners: 1,
            version: self.version,
            memory: Memory::Device(slab),
        };
        Ok(match self.free.pop() {
            Some(id) => {
                self.entries[id.0 as usize] = entry;
                id
            }
            None => {
                self.entries.push(entry);
                let id = u32::try_from(self.entries.len() - 1);
                Id(id.expect("as many slabs have no room in any memory"))
            }
        })
    }

    /// Has memory for `n` more slabs, which may be fewer than there is room for: another process may have taken what was counted on.
    pub(super) fn provide(&mut self, backend: &B, n: usize) -> Result<(), Error> {
        while self.spare.len() < n {
            #[cfg(test)]
            if self.device + self.spare.len() >= self.memory_slabs {
                return backend.slab(usize::MAX).map(|_| ());
            }
            self.spare.push(backend.slab(self.slab_bytes)?);
        }
        Ok(())
    }

    /// Gives up room in device memory for which there is no memory, and a slab more if there are two: what else a step needs must find memory, too.
    pub(super) fn stay(&mut self) {
        let there = self.device + self.spare.len();
        self.device_max = there.saturating_sub(1).max(1).min(self.device_max);
    }

    /// Gives memory back for which there is no room any more.
    pub(super) fn trim(&mut self) {
        let there = self.device + self.spare.len();
        let over = there.saturating_sub(self.device_max);
        self.spare.truncate(self.spare.len().saturating_sub(over));
    }

    fn take_device(&mut self, backend: &B) -> Result<B::Slab, Error> {
        assert!(self.device < self.device_max, "room was made");
        self.moves += 1;
        match self.spare.pop() {
            Some(slab) => Ok(slab),
            None => backend.slab(self.slab_bytes),
        }
    }

    /// One more owner.
    pub(super) fn share(&mut self, id: Id) {
        self.entries[id.0 as usize].owners += 1;
    }

    /// One owner less; without any the slab is gone.
    pub(super) fn release(&mut self, id: Id) {
        let entry = &mut self.entries[id.0 as usize];
        entry.owners -= 1;
        if entry.owners > 0 {
            return;
        }
        self.moves += 1;
        match std::mem::replace(&mut entry.memory, Memory::Free) {
            Memory::Device(slab) => {
                self.device -= 1;
                self.spare.push(slab);
            }
            Memory::Host(slab) => {
                self.host -= 1;
                self.spare_host.push(slab);
            }
            Memory::Free => unreachable!("it had an owner"),
        }
        self.free.push(id);
    }

    /// A copy of a shared slab, in device memory, which has room; the caller gives up its part of the other.
    pub(super) fn unshare(&mut self, backend: &mut B, id: Id) -> Result<Id, Error> {
        let copy = self.add(backend)?;
        let [from, to] = self
            .entries
            .get_disjoint_mut([id.0 as usize, copy.0 as usize])
            .expect("two slabs");
        let Memory::Device(to) = &mut to.memory else {
            unreachable!("new slabs are in device memory")
        };
        match &from.memory {
            Memory::Device(from) => backend.duplicate(from, to),
            Memory::Host(from) => backend.fetch(from, to),
            Memory::Free => unreachable!("it has owners"),
        }
        self.release(id);
        Ok(copy)
    }

    /// Moves a slab to host memory, which has room.
    pub(super) fn spill(&mut self, backend: &mut B, id: Id) -> Result<(), Error> {
        assert!(self.host < self.host_max, "room was made");
        self.moves += 1;
        let mut to = match self.spare_host.pop() {
            Some(slab) => slab,
            None => backend.host_slab(self.slab_bytes)?,
        };
        let entry = &mut self.entries[id.0 as usize];
        let Memory::Device(from) = &entry.memory else {
            unreachable!("only slabs in device memory are spilled")
        };
        backend.spill(from, &mut to);
        let Memory::Device(slab) = std::mem::replace(&mut entry.memory, Memory::Host(to)) else {
            unreachable!("it was a moment ago")
        };
        self.spare.push(slab);
        self.device -= 1;
        self.host += 1;
        Ok(())
    }

    /// Moves a slab to device memory, which has room.
    pub(super) fn fetch(&mut self, backend: &mut B, id: Id) -> Result<(), Error> {
        let mut to = self.take_device(backend)?;
        let entry = &mut self.entries[id.0 as usize];
        let Memory::Host(from) = &entry.memory else {
            unreachable!("only slabs in host memory are fetched")
        };
        backend.fetch(from, &mut to);
        let Memory::Host(slab) = std::mem::replace(&mut entry.memory, Memory::Device(to)) else {
            unreachable!("it was a moment ago")
        };
        self.spare_host.push(slab);
        self.host -= 1;
        self.device += 1;
        Ok(())
    }

    /// Appends a slab's bytes to `to`.
    pub(super) fn save(&self, backend: &B, id: Id, to: &mut Vec<u8>) -> Result<(), Error> {
        match &self.entry(id).memory {
            Memory::Device(slab) => backend.save(slab, to)?,
            Memory::Host(slab) => backend.save_host(slab, to)?,
            Memory::Free => unreachable!("it has owners"),
        }
        Ok(())
    }
}
